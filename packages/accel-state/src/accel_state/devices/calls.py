"""Functions of single device types that differ from those of `torch.<type>`; their specs name them.

Each key is the name of the `DeviceSpec` method or of the torch function that the function replaces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from accel_state import env
from accel_state.devices import probes
from accel_state.devices.ram import available_ram

Calls = Mapping[str, Callable[..., Any]]


def _calls(**functions: Callable[..., Any]) -> Calls:
    return MappingProxyType(functions)


def _cpu_prepare_group(num_processes: int) -> None:
    # Otherwise each process would start as many threads as the machine has cores.
    if not env.is_set("OMP_NUM_THREADS"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // num_processes))


def cpu_is_available() -> bool:
    """Return True: there is always a CPU."""
    return True


CPU = _calls(
    device_count=lambda: 1,
    synchronize=lambda: None,
    empty_cache=lambda: None,
    get_rng_state=lambda: torch.get_rng_state(),
    set_rng_state=lambda state: torch.set_rng_state(state),
    free_memory=available_ram,
    memory_allocated=lambda: 0,
    max_memory_allocated=lambda: 0,
    reset_peak_memory_stats=lambda: None,
    prepare_group=_cpu_prepare_group,
)


def _cuda_pci_address(index: int) -> str:
    properties: Any = torch.cuda.get_device_properties(index)
    # As Linux names it below /sys/bus/pci, which lists the cores near to it.
    domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


CUDA = _calls(has_bf16=lambda: torch.cuda.is_bf16_supported(), pci_address=_cuda_pci_address)


MPS = _calls(
    has_bf16=lambda: torch.backends.mps.is_macos_or_newer(14, 0),
    free_memory=lambda: torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(),
    memory_allocated=lambda: torch.mps.current_allocated_memory(),
    max_memory_allocated=lambda: 0,
    reset_peak_memory_stats=lambda: None,
)


def _hpu_random() -> Any:
    return import_module("habana_frameworks.torch.hpu.random")


def _hpu_prepare_group(_num_processes: int) -> None:
    import_module("habana_frameworks.torch.distributed.hccl")  # registers the backend


HPU = _calls(
    prepare_group=_hpu_prepare_group,
    # The first generation computes in bf16 alone.
    has_fp16=lambda: not probes.is_habana_gaudi1(),
    empty_cache=lambda: None,  # the bridge keeps no cache
    get_rng_state=lambda: _hpu_random().get_rng_state(),
    set_rng_state=lambda state: _hpu_random().set_rng_state(state),
)


def _xla() -> Any:
    return import_module("torch_xla.core.xla_model")


def _xla_runtime() -> Any:
    return import_module("torch_xla.runtime")


def xla_is_available() -> bool:
    """Return whether torch_xla runs on an accelerator here; it runs on the CPU too, which does not count."""
    # From the runtime, which decides when it starts.
    return probes.is_torch_xla_available() and _xla_runtime().device_type() in {"TPU", "CUDA", "NEURON"}


def _xla_launched_as() -> tuple[int, int, int, int]:
    runtime = _xla_runtime()
    return (
        runtime.global_ordinal(),
        runtime.world_size(),
        runtime.local_ordinal(),
        runtime.local_process_count(),
    )


def _xla_device() -> Any:
    return import_module("torch_xla").device()


def _xla_memory(key: str) -> int:
    return int(_xla().get_memory_info(_xla_device()).get(key, 0))


def _xla_prepare_group(_num_processes: int) -> None:
    import_module("torch_xla.distributed.xla_backend")  # registers the backend


XLA = _calls(
    prepare_group=_xla_prepare_group,
    device=_xla_device,
    device_count=lambda: _xla_runtime().local_device_count(),
    synchronize=lambda: _xla().wait_device_ops(),
    empty_cache=lambda: None,
    get_rng_state=lambda: _xla().get_rng_state(),
    set_rng_state=lambda state: _xla().set_rng_state(state),
    free_memory=lambda: _xla_memory("bytes_limit") - _xla_memory("bytes_used"),
    memory_allocated=lambda: _xla_memory("bytes_used"),
    max_memory_allocated=lambda: _xla_memory("peak_bytes_used"),
    reset_peak_memory_stats=lambda: None,
    launched_as=_xla_launched_as,
    barrier=lambda: _xla().rendezvous("accel.wait_for_everyone"),
)
