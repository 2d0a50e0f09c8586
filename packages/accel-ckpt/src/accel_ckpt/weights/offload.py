"""Weights on the disk, one file each, that are read when needed.

    <name>.dat    the elements of one tensor, in row-major order and in the bytes of its own dtype
    index.json    {"<name>": {"dtype": "bfloat16", "shape": [3, 2]}, ...}

An index in memory may also have weights that are read in place from safetensors files of any path:
`{"safetensors_file": "<path>", "weight_name": "<name in the file>", "dtype": "bfloat16"}`. `weight_name` in
an entry of the folder names the file, for tied weights that have one.

A tensor without elements has one zero byte, since an empty file cannot be mapped into memory.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.files.digests import regular_file, regular_size
from accel_ckpt.files.disk import replacing
from accel_ckpt.files.paths import check_inside, listed_file
from accel_ckpt.weights.mapped import SafetensorsFiles, map_tensor
from accel_ckpt.weights.open_folders import check_not_in_use, register_open_folder
from accel_ops.collectives.pack_sections import as_bytes

INDEX = "index.json"

Folder = str | os.PathLike[str]
Index = dict[str, dict[str, Any]]


def make_offload_folder(folder: Folder) -> None:
    """Create the folder for offloaded weights, if it does not exist.

    Args:
        folder: The folder.

    Raises:
        OSError: If it cannot be created.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        reason = f"the folder for offloaded weights cannot be made: {error.strerror}"
        raise OSError(error.errno, reason, str(folder)) from error


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: Folder, index: Index | None = None
) -> Index | None:
    """Write one weight to `<weight_name>.dat`.

    Args:
        weight: A tensor of any dtype, on any device.
        weight_name: Its name in the state dict.
        offload_folder: An existing folder.
        index: An entry for the weight is added to it; write it with `save_offload_index` at the end.

    Returns:
        `index`.

    Raises:
        ValueError: If the name would lead out of the folder, or the tensor consists of other tensors
            (DTensor, and quantized ones of torchao).
        OSError: If the file cannot be written; no partial file is left.
    """
    if not weight_name or not {"/", os.sep, "\0"}.isdisjoint(weight_name):
        raise ValueError(
            f"weight_name must be usable as the name of a file, not {weight_name!r}. Name weights as a "
            "state dict does, such as 'encoder.weight'."
        )
    if hasattr(weight, "__tensor_flatten__"):
        raise ValueError(
            f"{weight_name} is of the class {type(weight).__name__}, whose tensors are made of others and "
            'cannot be written to the disk. Keep it in memory: on "cpu" in a device map, or with cpu_offload.'
        )
    value = weight.detach().cpu()
    # As bytes, since numpy has no bfloat16 and no float8.
    content = as_bytes(value) if value.numel() else torch.zeros(1, dtype=torch.uint8)
    _write(Path(offload_folder) / f"{weight_name}.dat", content.numpy())
    if index is not None:
        index[weight_name] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return index


def load_offloaded_weight(weight_file: Folder, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Map the file of one weight into memory.

    Args:
        weight_file: The file that `offload_weight` wrote.
        weight_info: The weight's entry in the index.

    Returns:
        A tensor on the CPU whose pages are read when they are used. Writes to it never reach the file.

    Raises:
        CorruptCheckpointError: If the entry does not describe a tensor, or the file has another size.
    """
    shape, dtype = _described(weight_file, weight_info)
    count = math.prod(shape)
    # At least one byte, also for a tensor without elements: mmap rejects empty files.
    expected = max(count * dtype.itemsize, 1)
    size = regular_size(weight_file)
    # An empty file also counts as a tensor without elements.
    if size != expected and (count or size):
        raise CorruptCheckpointError(
            f"{weight_file} has {size} bytes; {shape} of {dtype} are {expected}. Offload the weights again."
        )
    return map_tensor(weight_file, 0, shape, dtype)


def save_offload_index(index: Index, offload_folder: Folder) -> None:
    """Add entries to the folder's index; existing names are replaced.

    Args:
        index: The entries; if empty, nothing is written.
        offload_folder: An existing folder.

    Raises:
        CorruptCheckpointError: If the folder has an index that cannot be read.
    """
    if not index:
        return
    path = Path(offload_folder) / INDEX
    entries = read_offload_index(offload_folder) if path.exists() else {}
    entries.update(index)
    # A crash leaves either the old index or the new one.
    with replacing(path) as draft:
        draft.write_text(json.dumps(entries, indent=2), encoding="utf-8")


def read_offload_index(offload_folder: Folder) -> Index:
    """Read the index of a folder.

    Args:
        offload_folder: The folder.

    Returns:
        Entries by name of the weight.

    Raises:
        FileNotFoundError: If the folder has no index.
        CorruptCheckpointError: If it is damaged, or a name in it leads out of the folder.
    """
    path = Path(offload_folder) / INDEX
    try:
        entries = json.loads(regular_file(path).read_bytes())
    except ValueError:
        entries = None
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise CorruptCheckpointError(f"{path} is not an index of offloaded weights. Offload them again.")
    for name, entry in entries.items():
        check_inside(f"{name}.dat", path)
        if "safetensors_file" in entry:
            raise CorruptCheckpointError(
                f"{path} says that {name} is in {entry['safetensors_file']}. Files in other "
                "places are only read if offload_index names them, not because a file does."
            )
    return entries


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write the weights of a state dict, and their index.

    Args:
        save_dir: The folder. It is created if needed; its other weights are kept.
        state_dict: Tensors by name.

    Raises:
        ValueError: If one would replace a weight that a model, or an `OffloadedWeightsLoader`, still reads.
        OSError: If a weight cannot be written.
    """
    check_not_in_use(save_dir, state_dict.keys())
    make_offload_folder(save_dir)
    entries: Index = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, entries)
    save_offload_index(entries, save_dir)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: list[str]
) -> dict[str, torch.Tensor]:
    """Keep the entries of some submodules.

    Args:
        state_dict: Tensors by name.
        submodule_names: Names of modules, or of single weights.

    Returns:
        The entries, in order and with their full names.
    """
    wanted = set(submodule_names)

    def is_wanted(key: str) -> bool:
        prefixes = accumulate(key.split("."), "{}.{}".format)
        return not wanted.isdisjoint(prefixes)

    return {key: value for key, value in state_dict.items() if is_wanted(key)}


class PrefixedDataset(Mapping[str, Any]):
    """Look names up under a prefix: `PrefixedDataset(weights, "encoder.")["bias"]` is
    `weights["encoder.bias"]`.

    Iteration yields the full names, as in `dataset`, of the entries with the prefix; the length is that of
    `dataset`.

    Args:
        dataset: The mapping that has the entries.
        prefix: The prefix of each name.
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[self.prefix + key]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        # Full names, as documented, although look-ups go without the prefix.
        return (name for name in self.dataset if name.startswith(self.prefix))

    def __len__(self) -> int:
        return len(self.dataset)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """One mapping of weights, of which some are in memory and the rest in a folder.

    Names in memory come first, and hide equal ones of the folder. A weight of the folder is mapped from its
    file at each access, and not cached.

    Args:
        state_dict: The weights in memory.
        save_folder: The folder of the rest.
        index: Entries of the weights in the folder, each with `dtype` and `shape`; by default all entries
            of the folder's index. Those with `safetensors_file` are read in place, from that file; once it
            changes, reading them is an error.
        device: The device of weights of the folder; the CPU by default.

    Raises:
        ValueError: If no argument is passed, or an index without its folder (not needed for entries in
            place).
        FileNotFoundError: If the folder has no index and none is passed.
        CorruptCheckpointError: If the folder's index is damaged, or a name in it leads out of the folder.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: Folder | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("OffloadedWeightsLoader needs a state_dict, a save_folder or an index.")
        if save_folder is None and any("safetensors_file" not in entry for entry in (index or {}).values()):
            raise ValueError("index lists weights on the disk: pass their folder as save_folder=.")
        if index is None and save_folder is not None:
            index = read_offload_index(save_folder)
        self.state_dict: Mapping[str, torch.Tensor] = state_dict or {}
        self.index: Mapping[str, Mapping[str, Any]] = index or {}
        self.save_folder = save_folder
        self.device = device
        self._in_place = SafetensorsFiles()
        self._in_place.open_all(
            {str(entry["safetensors_file"]) for entry in self.index.values() if "safetensors_file" in entry}
        )
        self._files: dict[str, str] = {}
        register_open_folder(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        register_open_folder(self)

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        if "safetensors_file" in entry:
            value = self._in_place.load(key, entry)
        else:
            value = load_offloaded_weight(self._file(str(entry.get("weight_name", key))), entry)
        return value if self.device is None else value.to(self.device)

    def replace(
        self,
        key: str,
        value: torch.Tensor,
        source: tuple[Path, str] | None = None,
        only_check: bool = False,
    ) -> None:
        """Replace the values of a weight of the folder, and of all weights tied to it, in its dtype.

        Args:
            key: Its name.
            value: The values.
            source: A safetensors file that has them, and their name there; it is read in place if the weight
                was, and the dtype is the same.
            only_check: Whether to only raise errors, and write nothing.

        Raises:
            ValueError: If another model reads the weight's file.
            OSError: If it cannot be written.
        """
        previous = self.index[key]
        dtype = getattr(torch, str(previous.get("dtype", value.dtype)).removeprefix("torch."))
        in_place = "safetensors_file" in previous
        name = key if in_place else str(previous.get("weight_name", key))
        stays = in_place and source is not None and value.dtype == dtype
        if not stays and self.save_folder is not None:
            check_not_in_use(self.save_folder, {name}, {id(self)})
        if only_check:
            return
        entries: Index = {}
        if stays and source is not None:
            entries[key] = {"safetensors_file": os.path.abspath(source[0]), "weight_name": source[1]}
            self._in_place.open_all([str(entries[key]["safetensors_file"])])
        elif self.save_folder is not None:
            make_offload_folder(self.save_folder)
            offload_weight(value.to(dtype), name, self.save_folder, entries)
            save_offload_index(entries, self.save_folder)
            entries = {key: {**entries[name], "weight_name": name}}
        tied = [other for other in self.index if self._location(other) == self._location(key)]
        if entries:
            entry = {"dtype": previous.get("dtype"), **entries[key]}
            self.index = {**self.index, **dict.fromkeys(tied, entry)}
        else:  # without a folder they stay in memory
            kept = value.to(dtype, copy=True)
            self.state_dict = {**self.state_dict, **dict.fromkeys(tied, kept)}

    def _location(self, key: str) -> tuple[Any, str]:
        entry = self.index[key]
        return entry.get("safetensors_file"), str(entry.get("weight_name", key))

    def _file(self, name: str) -> str:
        """Return the file of a weight in the folder; a cached path is only checked to be a file."""
        cached = self._files.get(name)
        with suppress(OSError):
            if cached is not None and stat.S_ISREG(os.lstat(cached).st_mode):
                return cached
        assert self.save_folder is not None
        folder = Path(self.save_folder)
        self._files[name] = path = str(listed_file(folder, f"{name}.dat", folder / INDEX))
        return path

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        yield from self.state_dict
        yield from (name for name in self.index if name not in self.state_dict)

    def __len__(self) -> int:
        return len(self.state_dict.keys() | self.index.keys())


def replace_offloaded(
    weights: Mapping[str, torch.Tensor],
    name: str,
    value: torch.Tensor,
    source: tuple[Path, str] | None = None,
    only_check: bool = False,
) -> None:
    """Replace the values of an offloaded weight where they are stored.

    Args:
        weights: The mapping that a hook reads it from.
        name: Its name there.
        value: The values.
        source: As for `OffloadedWeightsLoader.replace`.
        only_check: Whether to only check that it can be replaced.

    Raises:
        TypeError: If the mapping creates its tensors at each access.
        ValueError: As `OffloadedWeightsLoader.replace`, and OSError.
    """
    if isinstance(weights, ChainMap):
        weights = next(item for item in weights.maps if name in item)
    if isinstance(weights, PrefixedDataset):
        replace_offloaded(weights.dataset, weights.prefix + name, value, source, only_check)
    elif isinstance(weights, OffloadedWeightsLoader) and name not in weights.state_dict:
        weights.replace(name, value, source, only_check)
    elif isinstance(weights, OffloadedWeightsLoader):
        replace_offloaded(weights.state_dict, name, value, None, only_check)
    else:  # in memory: tied weights are one tensor
        stored = weights[name]
        if weights[name] is not stored:
            raise TypeError(
                f"{type(weights).__name__} creates {name} at each access, so that it cannot be changed: keep "
                "the offloaded weights in a dict."
            )
        if not only_check:
            with torch.no_grad():
                stored.copy_(value)


def _write(path: Path, content: Any) -> None:
    try:
        # A new file instead of the old one, which may be mapped.
        path.unlink(missing_ok=True)
        with open(path, "xb", buffering=0) as file:
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        reason = (
            f"the weight {path.stem} ({len(memoryview(content))} bytes) cannot be offloaded: {error.strerror}"
        )
        raise OSError(error.errno, reason, str(path)) from error


def _described(file: Folder, entry: Mapping[str, Any]) -> tuple[list[int], torch.dtype]:
    shape, dtype = entry.get("shape"), getattr(torch, str(entry.get("dtype")), None)
    sizes = isinstance(shape, list | tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
    if not sizes or not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(
            f"{file} has the entry {dict(entry)}, which is not a tensor: an entry has the name of a dtype "
            "and the list of a shape. Offload the weights again."
        )
    return list(shape or ()), dtype
