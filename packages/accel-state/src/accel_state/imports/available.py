"""Whether optional packages are installed, one check for each; `devices.probes` has those of hardware.

No check imports its package, except for bitsandbytes' backends. Results are cached, so that repeated calls
are cheap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from accel_state.imports import packages


def _installed(name: str, module: str | None = None) -> Callable[[], bool]:
    """Make the check of one package, by its import name."""

    def check() -> bool:
        return packages.is_package_available(module or name)

    # For tracebacks and the documentation.
    check.__name__ = check.__qualname__ = f"is_{name}_available"
    check.__doc__ = f"Return whether the package {module or name} is installed."
    return check


is_aim_available = _installed("aim")
is_amdsmi_available = _installed("amdsmi")
is_boto3_available = _installed("boto3")
is_clearml_available = _installed("clearml")
is_comet_ml_available = _installed("comet_ml")
is_datasets_available = _installed("datasets")
is_deepspeed_available = _installed("deepspeed")
is_dvclive_available = _installed("dvclive")
is_import_timer_available = _installed("import_timer")
is_lomo_available = _installed("lomo", "lomo_optim")
is_matplotlib_available = _installed("matplotlib")
is_megatron_lm_available = _installed("megatron_lm", "megatron.core")
is_mlflow_available = _installed("mlflow")  # the skinny edition has the same import name
is_msamp_available = _installed("msamp")
is_pandas_available = _installed("pandas")
is_peft_available = _installed("peft")
is_pynvml_available = _installed("pynvml")
is_pytest_available = _installed("pytest")
is_rich_available = _installed("rich")
is_sagemaker_available = _installed("sagemaker")
is_schedulefree_available = _installed("schedulefree")
is_swanlab_available = _installed("swanlab")
is_timm_available = _installed("timm")
is_torchdata_available = _installed("torchdata")
is_torchvision_available = _installed("torchvision")
is_trackio_available = _installed("trackio")
is_transformer_engine_available = _installed("transformer_engine")
is_transformers_available = _installed("transformers")
is_triton_available = _installed("triton")
is_wandb_available = _installed("wandb")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed.

    Args:
        min_version: Minimum version.
    """
    if not packages.is_package_available("bitsandbytes"):
        return False
    return min_version is None or packages.compare_versions("bitsandbytes", ">=", min_version)


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes has 4-bit layers (version 0.39.0 or above)."""
    return is_bnb_available(min_version="0.39.0")


def is_8bit_bnb_available() -> bool:
    """Return whether bitsandbytes has 8-bit layers (version 0.37.2 or above)."""
    return is_bnb_available(min_version="0.37.2")


@functools.cache
def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes runs on devices other than CUDA; which imports it."""
    if not is_bnb_available():
        return False
    import importlib

    # bitsandbytes lists a build's features there; versions without the list have only CUDA.
    return "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_fp8_available() -> bool:
    """Return whether a library for fp8 training is installed: MS-AMP, Transformer Engine or torchao."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_pippy_available() -> bool:
    """Return whether torch is installed: its pipeline parallelism is `torch.distributed.pipelining`."""
    return packages.is_package_available("torch")


def is_tensorboard_available() -> bool:
    """Return whether TensorBoard, or its writer tensorboardX, is installed."""
    return packages.is_package_available("tensorboard") or packages.is_package_available("tensorboardX")


def is_torchao_available() -> bool:
    """Return whether torchao 0.6.1 or above is installed (the first with stable fp8 training)."""
    return packages.is_package_available("torchao") and packages.compare_versions("torchao", ">=", "0.6.1")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether torchdata has its StatefulDataLoader (version 0.8.0 or above)."""
    return is_torchdata_available() and packages.compare_versions("torchdata", ">=", "0.8.0")


def is_weights_only_available() -> bool:
    """Return whether torch is installed: its `torch.load(weights_only=True)` takes an allow-list."""
    return packages.is_package_available("torch")


# Every check that is defined above, and no other name begins so.
__all__ = sorted(name for name in globals() if name.startswith("is_"))
