"""Hardware checks: on this machine, and with device plugins made for the test."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from accel_state import env
from accel_state.devices import probes
from accel_state.imports.packages import _compare_library, is_package_available

PLUGINS = {
    "npu": "torch_npu",
    "mlu": "torch_mlu",
    "musa": "torch_musa",
    "sdaa": "torch_sdaa",
    "neuron": "torch_neuronx",
}
# A device plugin registers a module on torch when it is imported, as the real ones do.
PLUGIN = """
import types
import torch

def device_count():
    return {count}

torch.{device} = types.SimpleNamespace(is_available=lambda: {available}, device_count=device_count)
"""


def forget():
    for value in [*vars(probes).values(), is_package_available, _compare_library]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder first on the import path; the devices registered from it are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before, attributes = set(sys.modules), set(vars(torch))
    forget()
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    for name in set(vars(torch)) - attributes:
        delattr(torch, name)
    forget()


def add_plugin(site, module, body):
    (site / f"{module}.py").write_text(body)
    importlib.invalidate_caches()
    forget()


@pytest.mark.parametrize("device", PLUGINS)
def test_a_plugin_device_is_available_once_its_plugin_says_so(site, device):
    check = getattr(probes, f"is_{device}_available")
    assert not check()
    add_plugin(site, PLUGINS[device], PLUGIN.format(device=device, available=True, count=0))
    assert check()
    assert not check(check_device=True)


def test_a_plugin_without_its_device(site):
    add_plugin(site, "torch_npu", PLUGIN.format(device="npu", available=False, count=0))
    assert not probes.is_npu_available()


def test_a_plugin_that_fails_to_import_is_warned_of(site):
    add_plugin(site, "torch_npu", "raise ImportError('libascend.so: not found')")
    with pytest.warns(
        UserWarning, match="torch_npu is installed but cannot be imported, so it is not used: libascend.so"
    ):
        assert not probes.is_npu_available()
    assert not probes.is_npu_available()


def test_cuda_is_as_torch_says_and_is_not_initialised():
    before = env.raw("PYTORCH_NVML_BASED_CUDA_CHECK")
    assert probes.is_cuda_available() == torch.cuda.is_available()
    assert env.raw("PYTORCH_NVML_BASED_CUDA_CHECK") == before
    assert not torch.cuda.is_initialized()


def test_cuda_is_asked_through_nvml(monkeypatch):
    seen = []
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: bool(seen.append(env.raw("PYTORCH_NVML_BASED_CUDA_CHECK")))
    )
    forget()
    assert probes.is_cuda_available() is False
    forget()
    assert seen == ["1"]


def test_bf16_without_an_accelerator_is_the_cpus():
    if not torch.cuda.is_available():
        assert probes.is_bf16_available()
        assert probes.is_bf16_available(ignore_tpu=True)
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    assert (x @ x).dtype is torch.bfloat16


def test_fp16_is_available():
    assert probes.is_fp16_available()


def test_fp8_capability_is_that_of_the_gpu():
    expected = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    assert probes.check_cuda_fp8_capability() is expected


def test_mps_takes_a_least_version_of_torch(monkeypatch):
    assert probes.is_mps_available() == torch.backends.mps.is_available()
    monkeypatch.setattr(probes, "_has_mps", lambda: True)
    assert probes.is_mps_available()
    assert not probes.is_mps_available(min_version="99.0")


def test_xla_device_types_exclude_each_other():
    with pytest.raises(ValueError, match="check_is_tpu=True and check_is_gpu=True exclude each other"):
        probes.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


@pytest.mark.parametrize(
    ("device", "tpu", "gpu"), [("TPU", True, False), ("CUDA", False, True), ("CPU", False, False)]
)
def test_xla_devices(site, device, tpu, gpu):
    assert not probes.is_torch_xla_available()
    (site / "torch_xla").mkdir()
    (site / "torch_xla" / "__init__.py").touch()
    (site / "torch_xla" / "runtime.py").write_text(f"def device_type():\n    return {device!r}\n")
    importlib.invalidate_caches()
    forget()
    assert probes.is_torch_xla_available()
    assert probes.is_torch_xla_available(check_is_tpu=True) is tpu
    assert probes.is_torch_xla_available(check_is_gpu=True) is gpu
    if tpu:
        assert probes.is_bf16_available()
        assert not probes.is_bf16_available(ignore_tpu=True)


@pytest.mark.parametrize(
    ("capability", "version", "truth"),
    [
        ((9, 0), "2.2.0", False),
        ((10, 0), "2.0.0", False),
        ((10, 0), "2.1.0", True),
        ((10, 3), "2.2.0", True),
        ((12, 0), "2.2.0", False),
    ],
)
def test_mxfp8_needs_the_gpu_and_the_version(site, monkeypatch, capability, version, truth):
    assert not probes.is_transformer_engine_mxfp8_available()
    (site / "transformer_engine").mkdir()
    (site / "transformer_engine" / "__init__.py").touch()
    info = site / f"transformer_engine-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: transformer-engine\nVersion: {version}\n")
    importlib.invalidate_caches()
    forget()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert probes.is_transformer_engine_mxfp8_available() is truth


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    assert probes.is_cuda_available()
    assert probes.is_bf16_available() == torch.cuda.is_bf16_supported()
