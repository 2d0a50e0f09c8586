"""Availability checks."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import time

import pytest

import accel_state
from accel_state.devices import probes
from accel_state.imports import available
from accel_state.imports.packages import _compare_library, is_package_available

# One predicate per optional package, and the module it looks for.
PACKAGES = {
    "aim": "aim",
    "amdsmi": "amdsmi",
    "bnb": "bitsandbytes",
    "boto3": "boto3",
    "clearml": "clearml",
    "comet_ml": "comet_ml",
    "datasets": "datasets",
    "deepspeed": "deepspeed",
    "dvclive": "dvclive",
    "import_timer": "import_timer",
    "lomo": "lomo_optim",
    "matplotlib": "matplotlib",
    "mlflow": "mlflow",
    "msamp": "msamp",
    "pandas": "pandas",
    "peft": "peft",
    "pynvml": "pynvml",
    "pytest": "pytest",
    "rich": "rich",
    "sagemaker": "sagemaker",
    "schedulefree": "schedulefree",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "timm": "timm",
    "torchdata": "torchdata",
    "torchvision": "torchvision",
    "trackio": "trackio",
    "transformer_engine": "transformer_engine",
    "transformers": "transformers",
    "triton": "triton",
    "wandb": "wandb",
}
DOCUMENTED = """
4bit_bnb 8bit_bnb aim amdsmi bf16 bitsandbytes_multi_backend bnb boto3 clearml comet_ml cuda
datasets deepspeed dvclive fp16 fp8 hpu import_timer lomo matplotlib megatron_lm mlflow mlu mps
msamp musa neuron npu pandas peft pippy pynvml pytest rich rocm sagemaker schedulefree sdaa swanlab
tensorboard timm torch_xla torchao torchdata torchdata_stateful_dataloader torchvision trackio
transformer_engine transformer_engine_mxfp8 transformers triton wandb weights_only xccl xpu
"""
VERSIONED = {
    "is_8bit_bnb_available": ("bitsandbytes", "0.37.1", "0.37.2"),
    "is_4bit_bnb_available": ("bitsandbytes", "0.38.9", "0.39.0"),
    "is_torchao_available": ("torchao", "0.6.0", "0.6.1"),
    "is_torchdata_stateful_dataloader_available": ("torchdata", "0.7.9", "0.8.0"),
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder first on the import path; every answer that it changed is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(sys.modules)
    forget()
    yield tmp_path
    for name in [name for name in sys.modules if name not in before]:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]
    forget()


def forget():
    caches = [*vars(available).values(), *vars(probes).values(), is_package_available, _compare_library]
    for cache in caches:
        if hasattr(cache, "cache_clear"):
            cache.cache_clear()


def add(site, module, version=None, body=""):
    folder = site
    for part in module.split("."):
        folder = folder / part
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    (folder / "__init__.py").write_text(body)
    if version:
        info = site / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n")
    importlib.invalidate_caches()


def test_every_documented_check_exists():
    missing = [name for name in DOCUMENTED.split() if f"is_{name}_available" not in accel_state.__all__]
    assert missing == []
    others = {
        "check_cuda_fp8_capability",
        "compare_versions",
        "is_habana_gaudi1",
        "is_torch_version",
        "require",
    }
    assert others <= set(accel_state.__all__)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("is_bf16_available", {"ignore_tpu": False}),
        ("is_bnb_available", {"min_version": None}),
        ("is_hpu_available", {"init_hccl": False}),
        ("is_mps_available", {"min_version": "1.12"}),
        ("is_npu_available", {"check_device": False}),
        ("is_mlu_available", {"check_device": False}),
        ("is_musa_available", {"check_device": False}),
        ("is_sdaa_available", {"check_device": False}),
        ("is_neuron_available", {"check_device": False}),
        ("is_xpu_available", {"check_device": False}),
        ("is_torch_xla_available", {"check_is_tpu": False, "check_is_gpu": False}),
    ],
)
def test_documented_signatures(name, parameters):
    signature = inspect.signature(getattr(accel_state, name))
    assert {key: parameter.default for key, parameter in signature.parameters.items()} == parameters


@pytest.mark.parametrize(
    "name", [name for name in accel_state.__all__ if name.endswith(("_available", "gaudi1"))]
)
def test_every_check_answers_with_a_bool(name):
    # One takes an argument, and the other imports its package, which takes seconds (it has a test below).
    if name not in ("is_package_available", "is_bitsandbytes_multi_backend_available"):
        assert type(getattr(accel_state, name)()) is bool


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_check_follows_the_installation(site, name):
    check = getattr(available, f"is_{name}_available")
    add(site, PACKAGES[name], body="raise RuntimeError('imported')")
    forget()
    assert check()


@pytest.mark.parametrize("name", sorted(set(PACKAGES) - {"pytest", "rich"}))
def test_a_package_check_says_no_without_it(monkeypatch, name):
    module = PACKAGES[name]
    forget()
    for blocked in (module, "tensorboardX"):
        monkeypatch.setitem(sys.modules, blocked, None)
    assert not getattr(available, f"is_{name}_available")()
    forget()


def test_tensorboardx_will_do(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    add(site, "tensorboardX")
    assert available.is_tensorboard_available()


def test_megatron_is_found_by_its_core(site):
    add(site, "megatron")
    assert not available.is_megatron_lm_available()
    forget()
    add(site, "megatron.core")
    assert available.is_megatron_lm_available()


@pytest.mark.parametrize("name", VERSIONED)
def test_versions_count(site, name):
    module, old, new = VERSIONED[name]
    check = getattr(available, name)
    add(site, module, old)
    assert not check()
    (site / f"{module}-{old}.dist-info").rename(site / f"{module}-{new}.dist-info")
    (site / f"{module}-{new}.dist-info" / "METADATA").write_text(f"Name: {module}\nVersion: {new}\n")
    importlib.invalidate_caches()
    forget()
    assert check()


def test_bnb_takes_a_least_version(site):
    add(site, "bitsandbytes", "0.40.0")
    assert available.is_bnb_available()
    assert available.is_bnb_available(min_version="0.40.0")
    assert not available.is_bnb_available(min_version="0.41.0")


def test_bnb_tells_of_its_backends(site):
    add(site, "bitsandbytes", "0.44.0", body="features = {'multi_backend'}")
    assert available.is_bitsandbytes_multi_backend_available() is True


def test_fp8_needs_one_of_its_libraries(site, monkeypatch):
    monkeypatch.setattr(available, "is_torchao_available", lambda: False)  # it may be installed
    assert not available.is_fp8_available()
    forget()
    add(site, "msamp")
    assert available.is_fp8_available()


def test_package_checks_are_cheap_when_asked_again():
    available.is_deepspeed_available()
    rounds = 1000
    start = time.perf_counter()
    for _ in range(rounds):
        available.is_deepspeed_available()
    assert (time.perf_counter() - start) / rounds < 20e-6


def test_package_checks_import_no_torch():
    code = (
        "import sys; from accel_state.imports import available\n"
        "for name in ('deepspeed', 'wandb', 'pippy', 'torchao', 'weights_only', 'fp8'):\n"
        "    getattr(available, f'is_{name}_available')()\n"
        "assert available.packages.is_torch_version('>=', '2.10')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
