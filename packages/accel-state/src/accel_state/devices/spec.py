"""The spec of a device type: its names, and how to call its runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from accel_state import env
from accel_state.enums import DistributedType, RNGType


@dataclass(frozen=True)
class DeviceSpec:
    """A device type: its names, and how to call its runtime.

    The methods call torch's module of the type (`torch.cuda`, `torch.npu` ...), unless `calls` overrides
    them.

    Args:
        type: The type's name, as in `torch.device(type)`.
        distributed_type: The distributed type of several processes on this hardware.
        backend: Communication backend for several processes; None when the hardware runs one process only.
        rng_type: Kind of the device's random generator; None when it has none.
        autocast_dtypes: The mixed precisions that autocast supports on such hardware: "bf16", "fp16".
        is_available: Returns whether this process can use such a device.
        extension: Module that registers the type with torch, imported on first use.
        indexed: Whether a process picks one device of several by its index.
        binds_group: Whether the process group takes the device when it is made (and barriers name it).
        visible_devices: Variable that restricts the devices which a process sees.
        init_method: The backend's rendezvous URL, if it has one.
        single_type: The distributed type of one process.
        streams: Whether it runs several streams concurrently, with `torch.cuda`'s interface.
        calls: Functions by name, for what the type's torch module lacks or names differently.
    """

    type: str
    distributed_type: DistributedType
    backend: str | None
    rng_type: RNGType | None
    autocast_dtypes: frozenset[str]
    is_available: Callable[[], bool]
    extension: str | None = None
    indexed: bool = True
    binds_group: bool = False
    visible_devices: str | None = None
    init_method: str | None = None
    single_type: DistributedType = DistributedType.NO
    streams: bool = False
    calls: Mapping[str, Callable[..., Any]] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    def has_autocast(self, precision: str) -> bool:
        """Return whether autocast supports a precision on this device.

        Args:
            precision: "bf16" or "fp16".
        """
        has_it = self.calls.get(f"has_{precision}")  # only where not all hardware of the type supports it
        return precision in self.autocast_dtypes and (has_it is None or bool(has_it()))

    def device(self, index: int | None = None) -> torch.device:
        """Return the device, without touching it.

        Args:
            index: The device's index; None for the current one.
        """
        self._extend()
        # XLA names its devices itself.
        if "device" in self.calls:
            return torch.device(self.calls["device"]())
        return torch.device(self.type) if index is None else torch.device(self.type, index)

    def requested_index(self) -> int | None:
        """Return the index that ACCELERATE_TORCH_DEVICE gives for this hardware, or None."""
        # Of this type alone: the variable may name a device of another type.
        kind, _, index = str(env.get("ACCELERATE_TORCH_DEVICE") or "").partition(":")
        return int(index) if kind == self.type and index else None

    def count(self) -> int:
        """Return the number of devices that this process sees."""
        return int(self._call("device_count"))

    def set_device(self, index: int | None) -> None:
        """Make one device the current one; a no-op for None or if there is only one.

        Args:
            index: The device's index.
        """
        if self.indexed and index is not None:
            self._call("set_device", index)

    def current_index(self) -> int:
        """Return the index of the current device; only where a process picks one of several."""
        return int(self._call("current_device"))

    def with_index(self, device: torch.device) -> torch.device:
        """Return a device with an index: that of the current device if it has none.

        Args:
            device: One of this type. A process that no launcher started has "cuda", without an index.

        Returns:
            The device with an index; unchanged if the type has none.
        """
        if device.index is not None or not self.indexed:
            return device
        return self.device(self.current_index())

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait until a device has finished all its work.

        Args:
            device: The device; None for the current one.
        """
        # torch.mps.synchronize, of one device, takes no argument.
        named = () if device is None or not self.indexed else (device,)
        self._call("synchronize", *named)

    def new_stream(self, device: torch.device) -> Any:
        """Return a new stream of a device (only with `streams`)."""
        return self._call("Stream", device)

    def current_stream(self, device: torch.device) -> Any:
        """Return the current stream of a device (only with `streams`)."""
        return self._call("current_stream", device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager that makes a stream the current one (only with `streams`).

        Args:
            stream: What `new_stream` returned.
        """
        context: AbstractContextManager[Any] = self._call("stream", stream)
        return context

    def empty_cache(self) -> None:
        """Release cached memory to the device."""
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
        """Return the memory of tensors on the current device, in bytes; 0 where it is not counted."""
        return int(self._call("memory_allocated"))

    def max_memory_allocated(self) -> int:
        """Return the peak memory of tensors since the last reset, in bytes; 0 where it is not counted."""
        return int(self._call("max_memory_allocated"))

    def reset_peak_memory_stats(self) -> None:
        """Reset `max_memory_allocated`."""
        self._call("reset_peak_memory_stats")

    def free_memory(self, index: int) -> int:
        """Return the free memory of a device, in bytes.

        Args:
            index: The device's index.
        """
        if "free_memory" in self.calls:
            return int(self.calls["free_memory"]())
        return int(self._call("mem_get_info", index)[0])  # (free, total), in bytes

    def pci_address(self, index: int) -> str | None:
        """Return the device's PCI address ("0000:1b:00.0"), or None if it is unknown.

        Args:
            index: The device's index.
        """
        address: str | None = self.calls["pci_address"](index) if "pci_address" in self.calls else None
        return address

    def prepare_group(self, num_processes: int) -> None:
        """Prepare for creating the process group of such devices.

        Args:
            num_processes: Number of processes on this machine.
        """
        if "prepare_group" in self.calls:
            self.calls["prepare_group"](num_processes)

    def launched_as(self) -> tuple[int, int, int, int] | None:
        """Return (rank, size, local rank, local size) if the runtime, not the launcher, sets them."""
        ranks: tuple[int, int, int, int] | None = (
            self.calls["launched_as"]() if "launched_as" in self.calls else None
        )
        return ranks

    def _extend(self) -> None:
        if self.extension is not None:
            import_module(self.extension)

    def _call(self, name: str, *args: Any) -> Any:
        # First, and before the extension is imported: functions of `calls` import what they need.
        if name in self.calls:
            return self.calls[name](*args)
        self._extend()
        # torch.<type> exists once the extension is imported, which registers it with torch.
        return getattr(getattr(torch, self.type), name)(*args)
