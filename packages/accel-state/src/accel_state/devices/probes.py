"""Probes of this machine's accelerator; torch and device plugins are imported on first use.

Answers about hardware are kept for the life of the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accel_state import env
from accel_state.imports.packages import compare_versions, is_package_available, is_torch_version
from accel_state.logging.warning import warn

# Devices


@functools.cache
def is_cuda_available() -> bool:
    """Return whether a CUDA device is usable; CUDA is not initialised, so that the process can still fork."""
    import torch

    # torch then uses the driver's library, which creates no CUDA context.
    with env.patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Return whether torch runs on AMD GPUs, which it presents as CUDA devices."""
    import torch

    # ROCm builds answer to torch.cuda.
    return torch.version.hip is not None and is_cuda_available()


@functools.cache
def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether Intel GPUs are usable.

    Args:
        check_device: Also require that the first device works.
    """
    return _is_backend_available("xpu", check_device)


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether Apple's GPU is usable.

    Args:
        min_version: Minimum version of torch.
    """
    return is_torch_version(">=", min_version) and _has_mps()


@functools.cache
def _has_mps() -> bool:
    import torch

    return torch.backends.mps.is_available() and torch.backends.mps.is_built()


def _plugin_check(device_type: str, plugin: str, devices: str) -> Callable[..., bool]:
    """Make the check of a device that a plugin registers with torch."""

    @functools.cache
    def check(check_device: bool = False) -> bool:
        return _has_plugin(plugin) and _is_backend_available(device_type, check_device)

    check.__name__ = check.__qualname__ = f"is_{device_type}_available"
    check.__doc__ = f"""Return whether {devices} are usable through {plugin}.

    Args:
        check_device: Also require that the first device works.
    """
    return check


is_npu_available = _plugin_check("npu", "torch_npu", "Ascend NPUs")
is_mlu_available = _plugin_check("mlu", "torch_mlu", "Cambricon MLUs")
is_musa_available = _plugin_check("musa", "torch_musa", "Moore Threads GPUs")
is_sdaa_available = _plugin_check("sdaa", "torch_sdaa", "Tecorigin accelerators")
is_neuron_available = _plugin_check("neuron", "torch_neuronx", "AWS Neuron devices")


@functools.cache
def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether Intel Gaudi devices are usable through habana_frameworks.

    Args:
        init_hccl: Also load Gaudi's collective library, which registers the `hccl` backend.
    """
    if not _has_plugin("habana_frameworks.torch") or not _is_backend_available("hpu", False):
        return False
    return not init_hccl or _has_plugin("habana_frameworks.torch.distributed.hccl")


@functools.cache
def is_habana_gaudi1() -> bool:
    """Return whether the Gaudi devices are of the first generation, which has no fp16."""
    if not is_hpu_available():
        return False
    from importlib import import_module

    experimental: Any = import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


@functools.cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is usable.

    Args:
        check_is_tpu: Also require that its devices are TPUs.
        check_is_gpu: Also require that its devices are GPUs.

    Raises:
        ValueError: If both are requested: a device is one or the other.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError("check_is_tpu=True and check_is_gpu=True exclude each other; pass one of them.")
    if not is_package_available("torch_xla"):
        return False
    # Without starting the runtime, which takes the devices for this process.
    if not check_is_tpu and not check_is_gpu:
        return True
    from importlib import import_module

    runtime: Any = import_module("torch_xla.runtime")
    device_type: str = runtime.device_type()
    return device_type in (("TPU",) if check_is_tpu else ("GPU", "CUDA"))


def _has_plugin(module: str) -> bool:
    """Import a device plugin, which is how it registers its device with torch."""
    from importlib import import_module

    if not is_package_available(module):
        return False
    try:
        import_module(module)
    # Vendors' libraries raise each of these where the driver is missing.
    except (ImportError, OSError, RuntimeError) as error:
        warn(f"{module} is installed but cannot be imported, so it is not used: {error}", about="machine")
        return False
    return True


def _is_backend_available(device_type: str, check_device: bool) -> bool:
    import torch

    backend: Any = getattr(torch, device_type, None)
    if backend is None or not backend.is_available():
        return False
    if not check_device:
        return True
    try:
        # A device that is counted may still be reserved by another process.
        return bool(backend.device_count() > 0 and torch.empty(0, device=f"{device_type}:0") is not None)
    except RuntimeError:
        return False


# Precisions and backends


@functools.cache
def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the machine's accelerator (the CPU, where there is none) computes in bfloat16.

    Args:
        ignore_tpu: Return False on TPUs.
    """
    import torch

    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    if is_cuda_available():
        return bool(torch.cuda.is_bf16_supported())
    if is_mps_available():
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    return True


def is_fp16_available() -> bool:
    """Return whether the machine's accelerator computes in float16."""
    return not is_habana_gaudi1()


def check_cuda_fp8_capability() -> bool:
    """Return whether the current CUDA device multiplies in fp8 (compute capability 8.9 or above)."""
    import torch

    return is_cuda_available() and tuple(torch.cuda.get_device_capability()) >= (8, 9)


@functools.cache
def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether Transformer Engine (2.1 or above) is installed and this GPU scales fp8 by blocks.

    MXFP8 products run on compute capabilities 10 and 11; on 12 Transformer Engine does not support them.
    """
    if not is_package_available("transformer_engine") or not is_cuda_available():
        return False
    import torch

    capability = tuple(torch.cuda.get_device_capability())
    # Compared as pairs of major and minor number.
    return (10, 0) <= capability < (12, 0) and compare_versions("transformer-engine", ">=", "2.1.0")


@functools.cache
def is_xccl_available() -> bool:
    """Return whether torch was built with XCCL, the communication backend of Intel GPUs."""
    import torch.distributed

    return torch.distributed.is_available() and torch.distributed.is_xccl_available()
