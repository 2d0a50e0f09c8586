"""The table of device types: which hardware there is, and how each kind is addressed.

One `DeviceSpec` per device type, tried in the table's order. No other module branches on a device type:
code that needs a generator, a memory figure or a communication backend calls the spec of the device. A
vendor's package (torch_npu, torch_xla ...) is imported when its spec is first used, and only where it is
installed. Detecting hardware leaves CUDA uninitialised, so that processes can still be forked afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

import torch

from accel_state import env
from accel_state.devices import calls, probes
from accel_state.devices.spec import DeviceSpec
from accel_state.enums import DistributedType, RNGType
from accel_state.logging.warning import warn

__all__ = [
    "DEVICES",
    "DeviceSpec",
    "default_device",
    "detect",
    "device_spec",
    "existing_device",
    "get_current_device_type",
]

# What the type usually supports; has_bf16 and has_fp16 in `calls` query the device where models differ.
_HALF = frozenset({"bf16", "fp16"})
_BF16 = frozenset({"bf16"})

DEVICES: Mapping[str, DeviceSpec] = MappingProxyType(
    {
        spec.type: spec
        for spec in (
            # Not tried for availability by an import alone: xla_is_available checks
            # the hardware behind torch_xla.
            DeviceSpec(
                "xla",
                DistributedType.XLA,
                "xla",
                RNGType.XLA,
                _BF16,
                calls.xla_is_available,
                extension="torch_xla",
                indexed=False,
                init_method="xla://",
                # One process on XLA is not NO: its steps and its reductions need torch_xla as well.
                single_type=DistributedType.XLA,
                calls=calls.XLA,
            ),
            DeviceSpec(
                "npu",
                DistributedType.MULTI_NPU,
                "hccl",
                RNGType.NPU,
                _HALF,
                probes.is_npu_available,
                extension="torch_npu",
                visible_devices="ASCEND_RT_VISIBLE_DEVICES",
                streams=True,
            ),
            DeviceSpec(
                "mlu",
                DistributedType.MULTI_MLU,
                "cncl",
                RNGType.MLU,
                _HALF,
                probes.is_mlu_available,
                extension="torch_mlu",
                visible_devices="MLU_VISIBLE_DEVICES",
                streams=True,
            ),
            DeviceSpec(
                "sdaa",
                DistributedType.MULTI_SDAA,
                "tccl",
                RNGType.SDAA,
                _HALF,
                probes.is_sdaa_available,
                extension="torch_sdaa",
                visible_devices="SDAA_VISIBLE_DEVICES",
                streams=True,
            ),
            DeviceSpec(
                "musa",
                DistributedType.MULTI_MUSA,
                "mccl",
                RNGType.MUSA,
                _HALF,
                probes.is_musa_available,
                extension="torch_musa",
                visible_devices="MUSA_VISIBLE_DEVICES",
                streams=True,
            ),
            # A process opens the next free module by itself, so the device has no index.
            DeviceSpec(
                "hpu",
                DistributedType.MULTI_HPU,
                "hccl",
                RNGType.HPU,
                _HALF,
                probes.is_hpu_available,
                extension="habana_frameworks.torch.core",
                indexed=False,
                calls=calls.HPU,
            ),
            DeviceSpec(
                "neuron",
                DistributedType.MULTI_NEURON,
                "neuron",
                RNGType.NEURON,
                _BF16,
                probes.is_neuron_available,
                extension="torch_neuronx",
                visible_devices="NEURON_RT_VISIBLE_CORES",
            ),
            DeviceSpec(
                "cuda",
                DistributedType.MULTI_GPU,
                "nccl",
                RNGType.CUDA,
                _HALF,
                probes.is_cuda_available,
                binds_group=True,
                visible_devices="CUDA_VISIBLE_DEVICES",
                calls=calls.CUDA,
                streams=True,
            ),
            DeviceSpec(
                "xpu",
                DistributedType.MULTI_XPU,
                "xccl",
                RNGType.XPU,
                _HALF,
                probes.is_xpu_available,
                visible_devices="ZE_AFFINITY_MASK",
                streams=True,
            ),
            DeviceSpec(
                "mps",
                # One device, and no communication backend for it: several processes
                # run on the CPU (see `_where`).
                DistributedType.NO,
                None,
                None,
                _HALF,
                probes.is_mps_available,
                indexed=False,
                calls=calls.MPS,
            ),
            DeviceSpec(
                "cpu",
                DistributedType.MULTI_CPU,
                "gloo",
                RNGType.TORCH,
                _HALF,
                calls.cpu_is_available,
                indexed=False,
                calls=calls.CPU,
            ),
        )
    }
)
"""Every device type, in the order in which hardware is looked for."""


def device_spec(device: torch.device | str) -> DeviceSpec:
    """Return the spec of a device.

    Args:
        device: A device, or its name with or without an index ("cuda", "cuda:1").

    Returns:
        The spec.

    Raises:
        ValueError: If the type is unknown.
    """
    name = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    if name not in DEVICES:
        raise ValueError(f"Device {str(device)!r} is not known; allowed types: {', '.join(DEVICES)}.")
    return DEVICES[name]


def detect(cpu: bool = False) -> DeviceSpec:
    """Detect the hardware that this process runs on.

    In order: `cpu` or ACCELERATE_USE_CPU, then ACCELERATE_TORCH_DEVICE, then the first type with a device.

    Args:
        cpu: Run on the CPU, whatever other hardware there is.

    Returns:
        The spec of the hardware.

    Raises:
        ValueError: If ACCELERATE_TORCH_DEVICE names an unknown type, or one that is not here.
    """
    requested = env.get("ACCELERATE_TORCH_DEVICE")
    if cpu or env.get("ACCELERATE_USE_CPU"):
        if requested and device_spec(requested).type != "cpu":
            warn(
                f"ACCELERATE_TORCH_DEVICE={requested} is ignored, because the CPU was requested (cpu=True or "
                "ACCELERATE_USE_CPU). Unset one of the two.",
            )
        return DEVICES["cpu"]
    if requested:
        return _requested_spec(requested)
    return next(entry for entry in DEVICES.values() if entry.is_available())


def default_device(cpu: bool = False) -> torch.device:
    """Return the device of a process that runs alone, without touching it.

    Args:
        cpu: Run on the CPU, whatever other hardware there is.

    Returns:
        The device that ACCELERATE_TORCH_DEVICE names, with its index; else the device of `detect`, without
        one.

    Raises:
        ValueError: As `detect`.
    """
    spec = detect(cpu)
    return spec.device(spec.requested_index())


def existing_device(device: int | str | torch.device) -> torch.device:
    """Return a device that this process can put tensors on.

    Args:
        device: A device or its name; an integer counts the accelerators. "meta" is always available.

    Returns:
        The device.

    Raises:
        ValueError: If it is not a device, or not available.
    """
    available = [entry for entry in DEVICES.values() if entry.is_available()]  # the CPU comes last
    result = None
    # An integer counts the devices of the first type found; torch.device(0) would leave the type to torch.
    if not isinstance(device, int):
        with suppress(RuntimeError):
            result = torch.device(device)
    elif available[0].type != "cpu":
        result = torch.device(available[0].type, device)
    if result is not None and (result.type == "meta" or _is_available(result, DEVICES.get(result.type))):
        return result
    kinds = ", ".join(f"{entry.type} ({entry.count()})" for entry in available)
    raise ValueError(f"There is no device {device} here. Devices by type: {kinds}.")


def _is_available(device: torch.device, entry: DeviceSpec | None) -> bool:
    return entry is not None and entry.is_available() and (device.index or 0) < entry.count()


def get_current_device_type() -> tuple[str, str]:
    """Return the type of accelerator of this process, without initialising it.

    Returns:
        Its type and the distributed type of several processes on it; ("cuda", "MULTI_GPU") where there is no
        accelerator that has its own communication backend.
    """
    accelerators = [entry for name, entry in DEVICES.items() if name not in ("xla", "mps", "cpu")]
    spec = next((entry for entry in accelerators if entry.is_available()), DEVICES["cuda"])
    return spec.type, spec.distributed_type.value


def _requested_spec(name: str) -> DeviceSpec:
    kind, _, index = name.partition(":")
    if kind not in DEVICES or not (index.isdigit() or ":" not in name):
        raise ValueError(
            f"ACCELERATE_TORCH_DEVICE={name} is not a device; give one of {', '.join(DEVICES)}, with or "
            'without an index ("cuda:1").'
        )
    spec = DEVICES[kind]
    if not spec.is_available():
        available = ", ".join(entry.type for entry in DEVICES.values() if entry.is_available())
        hint = f" (it needs the package {spec.extension})" if spec.extension else ""
        raise ValueError(
            f"ACCELERATE_TORCH_DEVICE={name}, but this process has no {kind} device{hint}; available: "
            f"{available}. Set it to one of these or unset it."
        )
    # torch accepts any index, and fails only when the first tensor is put there.
    if spec.indexed and index and int(index) >= spec.count():
        raise ValueError(
            f"ACCELERATE_TORCH_DEVICE={name}, but this process sees {spec.count()} {kind} device(s); "
            "indices count from 0."
        )
    return spec
