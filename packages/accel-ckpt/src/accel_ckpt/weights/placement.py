"""Where each weight of a checkpoint goes in a model, and in which dtype."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accel_ckpt.weights.mapped import converted
from accel_ckpt.weights.model_tensors import ModelTensors
from accel_ckpt.weights.offload import make_offload_folder, offload_weight, save_offload_index
from accel_ckpt.weights.open_folders import check_not_in_use, open_folders_of
from accel_ops.module_tensors import read_dtype
from accel_state.process.state import current_process

DeviceMap = Mapping[str, int | str | torch.device]
Folder = str | os.PathLike[str]


def device_for(name: str, device_map: DeviceMap, default: Any = None) -> Any:
    """Look a weight up in a device map.

    Args:
        name: Name of the weight.
        device_map: Device by name of a module or weight; the longest that fits decides, and "" fits all.
        default: The answer for a weight that the map leaves out; without it, that is an error.

    Returns:
        The device, as the map has it.

    Raises:
        ValueError: If the map leaves the weight out.
    """
    parts = name.split(".")
    # From the full name down to "", so that the most exact entry decides.
    for length in range(len(parts), -1, -1):
        prefix = ".".join(parts[:length])
        if prefix in device_map:
            return device_map[prefix]
    if default is None:
        raise ValueError(
            f"device_map says nothing about {name}. It has: {', '.join(map(repr, device_map))}. "
            'Add the module, or "" for all others.'
        )
    return default


def memory_device(device: int | str | torch.device) -> str:
    """Name the device of an entry of a device map: a number counts the accelerators, "disk" is the CPU."""
    if isinstance(device, int):
        kind = current_process().device.type
        return "cpu" if kind == "cpu" else f"{kind}:{device}"
    return "cpu" if str(device) == "disk" else str(device)


@dataclass(frozen=True)
class WeightPlacement:
    """Where a load places weights, by its options.

    Args:
        device_map: Device by name of a module or weight; None to fill the model where it is.
        offload_folder: Where weights of "disk" go.
        dtype: What floating-point weights become; None for what they are in the model.
        offload_buffers: Whether buffers go to "disk" too.
        fp32_modules: Modules whose weights are float32 if `dtype` is given.
        in_place: Leave weights in the safetensors files that have them in their dtype: those of "disk" until
            they are used, and those of "cpu" as memory that is mapped from there.
        index: Entries of the weights that are on the disk.
        before: What was on the meta device before it got a value, by name.
    """

    device_map: DeviceMap | None
    offload_folder: Path | None
    dtype: torch.dtype | None
    offload_buffers: bool
    fp32_modules: tuple[str, ...]
    in_place: bool = False
    index: dict[str, dict[str, Any]] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def from_options(
        cls,
        device_map: DeviceMap | None,
        offload_folder: Folder | None,
        dtype: str | torch.dtype | None,
        offload_buffers: bool,
        fp32_modules: list[str] | None = None,
        in_place: bool = False,
    ) -> WeightPlacement:
        """Check options as a user gives them."""
        if device_map is not None and not isinstance(device_map, Mapping):
            raise TypeError(
                f"device_map must be a dict of devices by name of a module, such as {{'': 'cpu'}}, not "
                f"{device_map!r}."
            )
        needs_folder = device_map and not in_place and "disk" in map(str, device_map.values())
        if needs_folder and offload_folder is None:
            raise ValueError("device_map puts weights on the disk: say where with offload_folder=.")
        folder = None if offload_folder is None else Path(offload_folder)
        return cls(
            device_map, folder, read_dtype(dtype), offload_buffers, tuple(fp32_modules or ()), in_place
        )

    def check(self, targets: ModelTensors) -> None:
        """Raise ValueError if the device map has no entry for a weight of the model."""
        if self.device_map is not None:
            for name in sorted(targets.expected):
                device_for(name, self.device_map)

    def place(
        self, targets: ModelTensors, name: str, value: torch.Tensor, source: tuple[Path, str] | None = None
    ) -> None:
        """Put one weight where it belongs.

        Args:
            targets: The weights of the model.
            name: Name of the weight.
            value: The weight as the checkpoint has it; it is copied, unless it can stay where it is mapped.
            source: The file of the weight and its name there, if it can be read in place.
        """
        own = targets.get(name)
        if own.is_meta and self.before.keys().isdisjoint(targets.names(name)):
            # Only what was without values can be put back; weights that were filled in place are overwritten.
            self.before[name] = own
        dtype = self._dtype_of(name, own)
        if self.device_map is None:
            if own.is_meta:
                targets.put(name, value.to("cpu", dtype, copy=True))
            else:
                _fill(own, value, dtype)
            return
        device = self._device_of(targets, name)
        if device == "disk":
            self._offload(name, value, dtype, source)
            if self.in_place:
                self._forget_other_names(targets, name)
            targets.put(name, torch.empty_like(value, dtype=dtype, device="meta"))
        else:
            targets.put(name, value.to(device, dtype, copy=not self._stays_mapped(name, source)))

    def finish(self) -> None:
        """Write the index of what went to the disk."""
        if self.offload_folder is not None:
            written = {name: entry for name, entry in self.index.items() if "safetensors_file" not in entry}
            save_offload_index(written, self.offload_folder)

    def undo(self, targets: ModelTensors) -> None:
        """Take back what a load that failed has placed: weights that had no values have none again."""
        for name, own in self.before.items():
            targets.restore(name, own)
        for name, entry in self.index.items():
            if "safetensors_file" not in entry and self.offload_folder is not None:
                (self.offload_folder / f"{name}.dat").unlink(missing_ok=True)

    def _forget_other_names(self, targets: ModelTensors, name: str) -> None:
        """Of a tied weight that files have several times the last counts, as in load_state_dict."""
        for other in targets.names(name):
            entry = None if other == name else self.index.pop(other, None)
            if entry is not None and "safetensors_file" not in entry and self.offload_folder is not None:
                (self.offload_folder / f"{other}.dat").unlink(missing_ok=True)

    def _stays_mapped(self, name: str, source: tuple[Path, str] | None) -> bool:
        """Whether a weight may share its memory with what was read.

        That is one mapping for each weight of safetensors, of which writes stay private. A weight that the
        file has under another name, too, needs memory of its own, as it may not be tied in the model.
        """
        return self.in_place and source is not None and _is_safetensors(source[0]) and source[1] == name

    def _offload(
        self, name: str, value: torch.Tensor, dtype: torch.dtype, source: tuple[Path, str] | None
    ) -> None:
        file, inside = source or (None, name)
        if file is not None and self._is_read_in_place(value, dtype, file):
            self.index[name] = {
                "safetensors_file": os.path.abspath(file),
                "weight_name": inside,
                "dtype": str(dtype).removeprefix("torch."),
            }
            return
        if self.offload_folder is None:
            raise ValueError(
                f"{file} is no safetensors file, from which {name} could be read in place: say where to "
                'write weights of "disk" with offload_folder=.'
            )
        self.write(name, converted(value, dtype) if self.in_place else value)

    def _is_read_in_place(self, value: torch.Tensor, dtype: torch.dtype, file: Path) -> bool:
        # Weights of another dtype would be converted at each use; where there is a folder, they are once.
        same = value.dtype == dtype or self.offload_folder is None
        return self.in_place and _is_safetensors(file) and same

    def check_folder(
        self, targets: ModelTensors, weights: Iterable[tuple[str, torch.Tensor, Path | None]]
    ) -> None:
        """Check that no weight that will be written replaces one that another model reads from the folder.

        Args:
            targets: The weights of the model.
            weights: Weights of the model by name, each with its file, if it can be read in place.

        Raises:
            ValueError: If one does.
        """
        if self.device_map is None or self.offload_folder is None:
            return
        written = {
            name
            for name, value, file in weights
            if self._device_of(targets, name) == "disk"
            and not (file and self._is_read_in_place(value, self._dtype_of(name, targets.get(name)), file))
        }
        if written:
            check_not_in_use(self.offload_folder, written, open_folders_of(targets.model))

    def write(self, name: str, value: torch.Tensor) -> None:
        """Write a weight to the folder for "disk", which there has to be.

        Args:
            name: Its name.
            value: The weight, on any device.

        Raises:
            ValueError: If it is of a class that cannot be written.
            OSError: If it cannot be written.
        """
        assert self.offload_folder is not None
        make_offload_folder(self.offload_folder)
        offload_weight(value, name, self.offload_folder, self.index)

    def _device_of(self, targets: ModelTensors, name: str) -> str:
        assert self.device_map is not None
        wanted = [device_for(other, self.device_map) for other in targets.names(name)]
        # Tied weights are one tensor: it cannot be in memory under one name and on the disk under another.
        in_memory = [memory_device(device) for device in wanted if str(device) != "disk"]
        if in_memory:
            return in_memory[0]
        return "disk" if self.offload_buffers or name not in targets.buffers else "cpu"

    def _dtype_of(self, name: str, own: torch.Tensor) -> torch.dtype:
        if self.dtype is None or not own.is_floating_point():
            return own.dtype
        path = f".{name.rpartition('.')[0]}."
        kept = any(f".{module}." in path or module == name for module in self.fp32_modules)
        return torch.float32 if kept else self.dtype


def _is_safetensors(file: Path) -> bool:
    return file.name.endswith(".safetensors")


def _fill(own: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> None:
    """Overwrite a tensor of the model; it stays the same object, which an optimizer may hold."""
    with torch.no_grad():
        if own.dtype != dtype:
            # Through .data, so that the parameter stays the same object with another dtype.
            own.data = own.data.to(dtype)
        own.copy_(value)
