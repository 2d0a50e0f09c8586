"""The placement of each weight of a checkpoint in a model: its device and dtype."""

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
    """Look up a weight in a device map.

    Args:
        name: Name of the weight.
        device_map: Device by name of a module or weight; the longest match decides, and "" matches all.
        default: The result for a weight that is not in the map; without it, that is an error.

    Returns:
        The device, as in the map.

    Raises:
        ValueError: If the weight is not in the map.
    """
    names = name.split(".")
    # From the full name down to "", so that the most specific entry decides.
    for length in range(len(names), -1, -1):
        prefix = ".".join(names[:length])
        if prefix in device_map:
            return device_map[prefix]
    if default is None:
        raise ValueError(
            f"device_map has no entry for {name}. It has: {', '.join(map(repr, device_map))}. "
            'Add the module, or "" for all others.'
        )
    return default


def memory_device(device: int | str | torch.device) -> str:
    """Return the device of an entry of a device map: a number is an accelerator, and "disk" is the CPU."""
    if isinstance(device, int):
        kind = current_process().device.type
        return "cpu" if kind == "cpu" else f"{kind}:{device}"
    return "cpu" if str(device) == "disk" else str(device)


@dataclass(frozen=True)
class WeightPlacement:
    """The placement of weights by the options of a load.

    Args:
        device_map: Device by name of a module or weight; None to load each weight on its current device.
        offload_folder: The folder of weights on "disk".
        dtype: The dtype of floating-point weights; None for that of the model.
        offload_buffers: Whether buffers go to "disk" too.
        fp32_modules: Modules whose weights are float32 if `dtype` is given.
        in_place: Read weights in place from safetensors files that have them in their dtype: those of "disk"
            when they are used, and those of "cpu" as mapped memory.
        index: Entries of the weights that are on the disk.
        original: The meta tensors that weights have replaced, by name.
    """

    device_map: DeviceMap | None
    offload_folder: Path | None
    dtype: torch.dtype | None
    offload_buffers: bool
    fp32_modules: tuple[str, ...]
    in_place: bool = False
    index: dict[str, dict[str, Any]] = field(default_factory=dict)
    original: dict[str, torch.Tensor] = field(default_factory=dict)

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
        """Check the options of a user."""
        if device_map is not None and not isinstance(device_map, Mapping):
            raise TypeError(
                f"device_map must be a dict of devices by name of a module, such as {{'': 'cpu'}}, not "
                f"{device_map!r}."
            )
        needs_folder = device_map and not in_place and "disk" in map(str, device_map.values())
        if needs_folder and offload_folder is None:
            raise ValueError("device_map puts weights on the disk: pass a folder as offload_folder=.")
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
        """Place one weight.

        Args:
            targets: The weights of the model.
            name: Name of the weight.
            value: The weight of the checkpoint; it is copied, unless it can stay mapped.
            source: The file of the weight and its name there, if it can be read in place.
        """
        current = targets.get(name)
        if current.is_meta and self.original.keys().isdisjoint(targets.names(name)):
            # Only meta tensors can be restored; weights that were loaded in place are overwritten.
            self.original[name] = current
        dtype = self._dtype_of(name, current)
        if self.device_map is None:
            if current.is_meta:
                targets.put(name, value.to("cpu", dtype, copy=True))
            else:
                _overwrite(current, value, dtype)
            return
        device = self._device_of(targets, name)
        if device == "disk":
            self._offload(name, value, dtype, source)
            if self.in_place:
                self._drop_other_names(targets, name)
            targets.put(name, torch.empty_like(value, dtype=dtype, device="meta"))
        else:
            targets.put(name, value.to(device, dtype, copy=not self._stays_mapped(name, source)))

    def finish(self) -> None:
        """Write the index of the weights on the disk."""
        if self.offload_folder is not None:
            written = {name: entry for name, entry in self.index.items() if "safetensors_file" not in entry}
            save_offload_index(written, self.offload_folder)

    def undo(self, targets: ModelTensors) -> None:
        """Undo a failed load: restore the meta tensors."""
        for name, tensor in self.original.items():
            targets.restore(name, tensor)
        for name, entry in self.index.items():
            if "safetensors_file" not in entry and self.offload_folder is not None:
                (self.offload_folder / f"{name}.dat").unlink(missing_ok=True)

    def _drop_other_names(self, targets: ModelTensors, name: str) -> None:
        """Keep only the last of the tied names that files have, as load_state_dict does."""
        for other in targets.names(name):
            entry = None if other == name else self.index.pop(other, None)
            if entry is not None and "safetensors_file" not in entry and self.offload_folder is not None:
                (self.offload_folder / f"{other}.dat").unlink(missing_ok=True)

    def _stays_mapped(self, name: str, source: tuple[Path, str] | None) -> bool:
        """Whether a weight may share memory with the mapped file.

        Each weight of safetensors has its own mapping, and writes to it are private. A weight that the file
        has under another name too needs its own memory, as it may not be tied in the model.
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
                f"{file} is not a safetensors file, from which {name} could be read in place: pass a folder "
                'for weights of "disk" as offload_folder=.'
            )
        self.write(name, converted(value, dtype) if self.in_place else value)

    def _is_read_in_place(self, value: torch.Tensor, dtype: torch.dtype, file: Path) -> bool:
        # Weights of another dtype would be converted at each use; with a folder, they are converted once.
        usable = value.dtype == dtype or self.offload_folder is None
        return self.in_place and _is_safetensors(file) and usable

    def check_folder(
        self, targets: ModelTensors, weights: Iterable[tuple[str, torch.Tensor, Path | None]]
    ) -> None:
        """Check that writing weights replaces none that another model reads from the folder.

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
        """Write a weight to the folder for "disk", which must be set.

        Args:
            name: Its name.
            value: The weight, on any device.

        Raises:
            ValueError: If its class cannot be written.
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

    def _dtype_of(self, name: str, current: torch.Tensor) -> torch.dtype:
        if self.dtype is None or not current.is_floating_point():
            return current.dtype
        path = f".{name.rpartition('.')[0]}."
        kept = any(f".{module}." in path or module == name for module in self.fp32_modules)
        return torch.float32 if kept else self.dtype


def _is_safetensors(file: Path) -> bool:
    return file.name.endswith(".safetensors")


def _overwrite(current: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> None:
    """Overwrite a tensor of the model; the object stays the same, as an optimizer may refer to it."""
    with torch.no_grad():
        if current.dtype != dtype:
            # Through .data, so that the parameter stays the same object with another dtype.
            current.data = current.data.to(dtype)
        current.copy_(value)
