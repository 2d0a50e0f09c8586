"""The table of device types: which hardware there is, and how each kind is addressed.

One row per device type, tried in the table's order. No other module branches on a device type: whoever
needs a generator, a memory figure or a communication backend asks the row of the device. A vendor's package
(torch_npu, torch_xla ...) is imported when its row is first used, and only where it is installed. Looking
for hardware leaves CUDA uninitialised, so that processes can still be forked afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

import torch

from accel_state import env
from accel_state.devices import calls, probes
from accel_state.devices.row import DeviceRow
from accel_state.enums import DistributedType, RNGType
from accel_state.logging.warning import warn

__all__ = [
    "DEVICES",
    "DeviceRow",
    "default_device",
    "detect",
    "existing_device",
    "get_current_device_type",
    "row",
]

# What the kind has as a rule; has_bf16 and has_fp16 in `calls` ask the device where that differs by model.
_HALF = frozenset({"bf16", "fp16"})
_BF16 = frozenset({"bf16"})

DEVICES: Mapping[str, DeviceRow] = MappingProxyType(
    {
        row.type: row
        for row in (
            # Not tried for availability by an import alone: xla_is_available asks for
            # the hardware behind torch_xla.
            DeviceRow(
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
            DeviceRow(
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
            DeviceRow(
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
            DeviceRow(
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
            DeviceRow(
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
            DeviceRow(
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
            DeviceRow(
                "neuron",
                DistributedType.MULTI_NEURON,
                "neuron",
                RNGType.NEURON,
                _BF16,
                probes.is_neuron_available,
                extension="torch_neuronx",
                visible_devices="NEURON_RT_VISIBLE_CORES",
            ),
            DeviceRow(
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
            DeviceRow(
                "xpu",
                DistributedType.MULTI_XPU,
                "xccl",
                RNGType.XPU,
                _HALF,
                probes.is_xpu_available,
                visible_devices="ZE_AFFINITY_MASK",
                streams=True,
            ),
            DeviceRow(
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
            DeviceRow(
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


def row(device: torch.device | str) -> DeviceRow:
    """Return the row of a device.

    Args:
        device: A device, or its name with or without an index ("cuda", "cuda:1").

    Returns:
        The row.

    Raises:
        ValueError: If there is no such row.
    """
    name = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    if name not in DEVICES:
        raise ValueError(f"Device {str(device)!r} is not known; allowed types: {', '.join(DEVICES)}.")
    return DEVICES[name]


def detect(cpu: bool = False) -> DeviceRow:
    """Find the hardware that this process is to run on.

    In order: `cpu` or ACCELERATE_USE_CPU, then ACCELERATE_TORCH_DEVICE, then the first row with a device.

    Args:
        cpu: Run on the CPU whatever else there is.

    Returns:
        The row of the hardware.

    Raises:
        ValueError: If ACCELERATE_TORCH_DEVICE names an unknown type, or one that is not here.
    """
    asked = env.get("ACCELERATE_TORCH_DEVICE")
    if cpu or env.get("ACCELERATE_USE_CPU"):
        if asked and row(asked).type != "cpu":
            warn(
                f"ACCELERATE_TORCH_DEVICE={asked} is ignored, because the CPU was asked for (cpu=True or "
                "ACCELERATE_USE_CPU). Unset one of the two.",
            )
        return DEVICES["cpu"]
    if asked:
        return _asked(asked)
    return next(entry for entry in DEVICES.values() if entry.is_available())


def default_device(cpu: bool = False) -> torch.device:
    """Return the device of a process that runs alone, without touching it.

    Args:
        cpu: Run on the CPU whatever else there is.

    Returns:
        The device that ACCELERATE_TORCH_DEVICE names, with its index; else the device of `detect`, without
        one.

    Raises:
        ValueError: As `detect`.
    """
    found = detect(cpu)
    return found.device(found.asked_index())


def existing_device(device: int | str | torch.device) -> torch.device:
    """Return a device that this process can put tensors on.

    Args:
        device: A device or its name; an integer counts the accelerators. "meta" is always there.

    Returns:
        The device.

    Raises:
        ValueError: If it is not a device, or not here.
    """
    here = [entry for entry in DEVICES.values() if entry.is_available()]  # the CPU comes last
    found = None
    # An integer counts the devices of the first kind found; torch.device(0) would leave the kind to torch.
    if not isinstance(device, int):
        with suppress(RuntimeError):
            found = torch.device(device)
    elif here[0].type != "cpu":
        found = torch.device(here[0].type, device)
    if found is not None and (found.type == "meta" or _is_here(found, DEVICES.get(found.type))):
        return found
    kinds = ", ".join(f"{entry.type} ({entry.count()})" for entry in here)
    raise ValueError(f"There is no device {device} here. Devices by type: {kinds}.")


def _is_here(device: torch.device, entry: DeviceRow | None) -> bool:
    return entry is not None and entry.is_available() and (device.index or 0) < entry.count()


def get_current_device_type() -> tuple[str, str]:
    """Return what kind of accelerator this process has, without initialising it.

    Returns:
        Its type and the distributed type of several processes on it; ("cuda", "MULTI_GPU") where there is no
        accelerator that several processes use by a communication backend of their own.
    """
    several = [entry for name, entry in DEVICES.items() if name not in ("xla", "mps", "cpu")]
    found = next((entry for entry in several if entry.is_available()), DEVICES["cuda"])
    return found.type, found.distributed_type.value


def _asked(name: str) -> DeviceRow:
    kind, _, index = name.partition(":")
    if kind not in DEVICES or not (index.isdigit() or ":" not in name):
        raise ValueError(
            f"ACCELERATE_TORCH_DEVICE={name} is not a device; give one of {', '.join(DEVICES)}, with or "
            "without "
            'an index ("cuda:1").'
        )
    found = DEVICES[kind]
    if not found.is_available():
        here = ", ".join(entry.type for entry in DEVICES.values() if entry.is_available())
        hint = f" (it needs the package {found.extension})" if found.extension else ""
        raise ValueError(
            f"ACCELERATE_TORCH_DEVICE={name}, but this process has no {kind} device{hint}; available: "
            f"{here}. Set it to one of these or unset it."
        )
    # torch itself accepts any index, and fails only when the first tensor is put there.
    if found.indexed and index and int(index) >= found.count():
        raise ValueError(
            f"ACCELERATE_TORCH_DEVICE={name}, but this process sees {found.count()} {kind} device(s); "
            "indices count from 0."
        )
    return found
