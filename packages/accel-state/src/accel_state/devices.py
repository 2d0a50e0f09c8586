"""The table of device types: which hardware there is, and how each kind is addressed.

One row per device type, tried in the table's order. No other module branches on a device type: whoever needs
a generator, a memory figure or a communication backend asks the row of the device. A vendor's package
(torch_npu, torch_xla ...) is imported when its row is first used, and only where it is installed. Looking for
hardware leaves CUDA uninitialised, so that processes can still be forked afterwards.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch

from accel_state import device_calls, env
from accel_state.enums import DistributedType, RNGType

__all__ = ["DEVICES", "DeviceRow", "default_device", "detect", "row"]

_HALF = frozenset({"bf16", "fp16"})
_BF16 = frozenset({"bf16"})


@dataclass(frozen=True)
class DeviceRow:
    """What one device type is called, and how its runtime is called.

    The methods go to the module that torch has for the type (`torch.cuda`, `torch.npu` ...), but for those
    that `calls` names.

    Args:
        type: The type's name, as in `torch.device(type)`.
        distributed_type: How several processes on this hardware are called.
        backend: Communication backend for several processes; None when the hardware runs one process only.
        rng_type: Kind of the device's random generator; None when it has none of its own.
        autocast_dtypes: The mixed precisions that autocast has on it: "bf16", "fp16".
        extension: Module that registers the type with torch, imported on first use.
        indexed: Whether a process picks one device of several by its index.
        binds_group: Whether the process group takes the device when it is made (and barriers name it).
        visible_devices: Variable that restricts the devices which a process sees.
        init_method: The backend's own rendezvous, where there is one.
        single_type: The distributed type of one process.
        calls: Functions by name, for what the type's torch module lacks or names otherwise.
    """

    type: str
    distributed_type: DistributedType
    backend: str | None
    rng_type: RNGType | None
    autocast_dtypes: frozenset[str]
    extension: str | None = None
    indexed: bool = True
    binds_group: bool = False
    visible_devices: str | None = None
    init_method: str | None = None
    single_type: DistributedType = DistributedType.NO
    calls: Mapping[str, Callable[..., Any]] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    def is_available(self) -> bool:
        """Tell whether this process can use such a device (asked once, then remembered)."""
        return _is_available(self.type)

    def device(self, index: int | None = None) -> torch.device:
        """Return the device, without touching it.

        Args:
            index: Which of several; None for the current one.
        """
        self._extend()
        if "device" in self.calls:
            return torch.device(self.calls["device"]())
        return (
            torch.device(self.type, index) if self.indexed and index is not None else torch.device(self.type)
        )

    def count(self) -> int:
        """Return the number of devices that this process sees."""
        return int(self._call("device_count"))

    def set_device(self, index: int | None) -> None:
        """Make one device the current one; nothing for None or where there is only one.

        Args:
            index: Which of several.
        """
        if self.indexed and index is not None:
            self._call("set_device", index)

    def synchronize(self) -> None:
        """Wait until the device has done all work given to it."""
        self._call("synchronize")

    def empty_cache(self) -> None:
        """Give cached memory back to the device."""
        self._call("empty_cache")

    def get_rng_state(self) -> torch.Tensor | int:
        """Return the state of the current device's random generator (uint8 tensor; an integer on XLA)."""
        state: torch.Tensor | int = self._call("get_rng_state")
        return state

    def set_rng_state(self, state: torch.Tensor | int) -> None:
        """Set the state of the current device's random generator.

        Args:
            state: What `get_rng_state` returned.
        """
        self._call("set_rng_state", state)

    def memory_allocated(self) -> int:
        """Return the memory that tensors take on the current device, in bytes; 0 where it is not counted."""
        return int(self._call("memory_allocated"))

    def max_memory_allocated(self) -> int:
        """Return the most memory that tensors took since the last reset, in bytes; 0 where not counted."""
        return int(self._call("max_memory_allocated"))

    def reset_peak_memory_stats(self) -> None:
        """Start counting `max_memory_allocated` anew."""
        self._call("reset_peak_memory_stats")

    def pci_address(self, index: int) -> str | None:
        """Return where the device sits on the PCI bus ("0000:1b:00.0"), or None where that is not known.

        Args:
            index: Which of several.
        """
        address: str | None = self.calls["pci_address"](index) if "pci_address" in self.calls else None
        return address

    def share_cores(self, num_processes: int) -> None:
        """Divide the machine's cores among processes that compute on them; nothing for other hardware.

        Args:
            num_processes: Number of processes on this machine.
        """
        if "share_cores" in self.calls:
            self.calls["share_cores"](num_processes)

    def launched_as(self) -> tuple[int, int, int, int] | None:
        """Return (rank, size, local rank, local size) where the runtime, not the launcher, knows them."""
        facts: tuple[int, int, int, int] | None = (
            self.calls["launched_as"]() if "launched_as" in self.calls else None
        )
        return facts

    def _extend(self) -> None:
        if self.extension is not None:
            importlib.import_module(self.extension)

    def _call(self, name: str, *args: Any) -> Any:
        if name in self.calls:
            return self.calls[name](*args)
        self._extend()
        return getattr(getattr(torch, self.type), name)(*args)


def _rows(*rows: DeviceRow) -> dict[str, DeviceRow]:
    return {entry.type: entry for entry in rows}


DEVICES: Mapping[str, DeviceRow] = MappingProxyType(
    _rows(
        DeviceRow(
            "xla",
            DistributedType.XLA,
            "xla",
            RNGType.XLA,
            _BF16,
            extension="torch_xla",
            indexed=False,
            init_method="xla://",
            single_type=DistributedType.XLA,
            calls=device_calls.XLA,
        ),
        DeviceRow(
            "npu",
            DistributedType.MULTI_NPU,
            "hccl",
            RNGType.NPU,
            _HALF,
            extension="torch_npu",
            visible_devices="ASCEND_RT_VISIBLE_DEVICES",
        ),
        DeviceRow(
            "mlu",
            DistributedType.MULTI_MLU,
            "cncl",
            RNGType.MLU,
            _HALF,
            extension="torch_mlu",
            visible_devices="MLU_VISIBLE_DEVICES",
        ),
        DeviceRow(
            "sdaa",
            DistributedType.MULTI_SDAA,
            "tccl",
            RNGType.SDAA,
            _HALF,
            extension="torch_sdaa",
            visible_devices="SDAA_VISIBLE_DEVICES",
        ),
        DeviceRow(
            "musa",
            DistributedType.MULTI_MUSA,
            "mccl",
            RNGType.MUSA,
            _HALF,
            extension="torch_musa",
            visible_devices="MUSA_VISIBLE_DEVICES",
        ),
        # A process opens the next free module by itself, so the device has no index.
        DeviceRow(
            "hpu",
            DistributedType.MULTI_HPU,
            "hccl",
            RNGType.HPU,
            _HALF,
            extension="habana_frameworks.torch.core",
            indexed=False,
            calls=device_calls.HPU,
        ),
        DeviceRow(
            "neuron",
            DistributedType.MULTI_NEURON,
            "neuron",
            RNGType.NEURON,
            _BF16,
            extension="torch_neuronx",
            visible_devices="NEURON_RT_VISIBLE_CORES",
        ),
        DeviceRow(
            "cuda",
            DistributedType.MULTI_GPU,
            "nccl",
            RNGType.CUDA,
            _HALF,
            binds_group=True,
            visible_devices="CUDA_VISIBLE_DEVICES",
            calls=device_calls.CUDA,
        ),
        DeviceRow(
            "xpu",
            DistributedType.MULTI_XPU,
            "xccl",
            RNGType.XPU,
            _HALF,
            visible_devices="ZE_AFFINITY_MASK",
        ),
        DeviceRow("mps", DistributedType.NO, None, None, _HALF, indexed=False, calls=device_calls.MPS),
        DeviceRow(
            "cpu",
            DistributedType.MULTI_CPU,
            "gloo",
            RNGType.TORCH,
            _HALF,
            indexed=False,
            calls=device_calls.CPU,
        ),
    )
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
            warnings.warn(
                f"ACCELERATE_TORCH_DEVICE={asked} is ignored, because the CPU was asked for (cpu=True or "
                "ACCELERATE_USE_CPU). Unset one of the two.",
                stacklevel=2,
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
    return found.device(asked_index(found))


def asked_index(found: DeviceRow) -> int | None:
    """Return the index that ACCELERATE_TORCH_DEVICE gives for this hardware, or None."""
    kind, _, index = str(env.get("ACCELERATE_TORCH_DEVICE") or "").partition(":")
    return int(index) if kind == found.type and index else None


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
    if found.indexed and index and int(index) >= found.count():
        raise ValueError(
            f"ACCELERATE_TORCH_DEVICE={name}, but this process sees {found.count()} {kind} device(s); "
            "indices count from 0."
        )
    return found


@cache
def _is_available(kind: str) -> bool:
    entry = DEVICES[kind]
    if entry.extension is not None and find_spec(entry.extension.partition(".")[0]) is None:
        return False
    return bool(entry._call("is_available"))
