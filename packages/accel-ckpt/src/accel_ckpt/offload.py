"""Weights on the disk, one file each, that are read when they are needed.

A folder of offloaded weights has `<name>.dat`, the bytes of each tensor, and `index.json` with its dtype and
shape.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.paths import check_inside, listed_file

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_state_dict",
    "offload_weight",
    "read_offload_index",
    "save_offload_index",
]

INDEX = "index.json"

Folder = str | os.PathLike[str]
Index = dict[str, dict[str, Any]]


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: Folder, index: Index | None = None
) -> Index | None:
    """Write one weight into a folder of offloaded weights.

    Args:
        weight: The weight.
        weight_name: Its name.
        offload_folder: The folder; it must be there.
        index: The folder's index, to which the weight is added.

    Returns:
        `index`.

    Raises:
        ValueError: If the name cannot be the name of a file.
    """
    if "/" in weight_name or os.sep in weight_name or not weight_name:
        raise ValueError(f"weight_name must be usable as the name of a file, not {weight_name!r}.")
    data = weight.detach().cpu().contiguous()
    flat = torch.empty(0, dtype=torch.uint8)
    if data.numel():
        size = data.numel() * data.element_size()
        flat.set_(data.untyped_storage(), data.storage_offset() * data.element_size(), (size,), (1,))
    flat.numpy().tofile(Path(offload_folder) / f"{weight_name}.dat")
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: Folder, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Open one offloaded weight.

    Args:
        weight_file: Its file.
        weight_info: What the index says about it: `dtype` and `shape`.

    Returns:
        The weight, mapped from the file: what is not used is not read. Writing to it leaves the file as it
        is.

    Raises:
        CorruptCheckpointError: If the file has another size, or the index names no dtype of torch.
    """
    dtype, shape = getattr(torch, str(weight_info["dtype"]), None), [int(n) for n in weight_info["shape"]]
    if not isinstance(dtype, torch.dtype) or any(n < 0 for n in shape):
        raise CorruptCheckpointError(f"{weight_file} is said to be {dict(weight_info)}, which is no tensor.")
    count = 1
    for length in shape:
        count *= length
    size, expected = os.path.getsize(weight_file), count * dtype.itemsize
    if size != expected:
        raise CorruptCheckpointError(
            f"{weight_file} has {size} bytes; {shape} of {dtype} are {expected}. Offload the weights anew."
        )
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(os.fspath(weight_file), shared=False, size=count, dtype=dtype).reshape(shape)


def save_offload_index(index: Index, offload_folder: Folder) -> None:
    """Add weights to the index of a folder of offloaded weights.

    Args:
        index: What `offload_weight` has gathered; nothing happens if it is empty.
        offload_folder: The folder.
    """
    if not index:
        return
    path = Path(offload_folder) / INDEX
    whole = {**(read_offload_index(offload_folder) if path.is_file() else {}), **index}
    draft = path.with_name(f".{INDEX}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(whole, indent=2), encoding="ascii")
    os.replace(draft, path)


def read_offload_index(offload_folder: Folder) -> Index:
    """Read the index of a folder of offloaded weights.

    Args:
        offload_folder: The folder.

    Raises:
        FileNotFoundError: If there is none.
        CorruptCheckpointError: If it is damaged, or names a file outside of the folder.
    """
    path = Path(offload_folder) / INDEX
    try:
        index = json.loads(path.read_bytes())
        if not all(isinstance(info, dict) for info in index.values()):
            raise ValueError("entries")
    except (ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{path} is no index of offloaded weights. Offload them anew."
        ) from error
    for name, info in index.items():
        check_inside(str(info.get("safetensors_file", f"{name}.dat")), path)
    return dict(index)


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all weights of a state dict into a folder of offloaded weights.

    Args:
        save_dir: The folder; made if it is not there.
        state_dict: Tensors by name.
    """
    os.makedirs(save_dir, exist_ok=True)
    index: Index = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: list[str]
) -> dict[str, torch.Tensor]:
    """Return the part of a state dict that belongs to submodules.

    Args:
        state_dict: Tensors by name.
        submodule_names: Names of the submodules, or of single entries.
    """
    prefixes = tuple(f"{name}." for name in submodule_names)
    return {
        name: value
        for name, value in state_dict.items()
        if name in submodule_names or name.startswith(prefixes)
    }


class PrefixedDataset(Mapping[str, Any]):
    """A mapping asked by names without their prefix.

    Args:
        dataset: The mapping.
        prefix: What is put before each name that is asked for.
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in self.dataset if key.startswith(self.prefix)])

    def __len__(self) -> int:
        return len(self.dataset)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights in memory and on the disk as one mapping; the latter are read when they are asked for.

    Args:
        state_dict: Weights in memory.
        save_folder: A folder of offloaded weights.
        index: What is on the disk; by default the folder's index. An entry has `dtype` and `shape`, or
            `safetensors_file`, with `weight_name` if it has another name there, and `dtype` to be cast to.
        device: Where weights of safetensors files are read to.

    Raises:
        ValueError: If there is nothing to load from.
        CorruptCheckpointError: If the folder's index is damaged, or names a file outside of the folder.
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
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        self._from_folder = index is None
        if index is None:
            index = {} if save_folder is None else read_offload_index(save_folder)
        self.index = index
        self.device = device
        self.all_keys = [*self.state_dict, *(name for name in index if name not in self.state_dict)]

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        if "safetensors_file" not in info:
            return load_offloaded_weight(self._file(f"{key}.dat"), info)
        from safetensors import safe_open

        path = self._file(info["safetensors_file"])
        with safe_open(
            path, framework="pt", device=str("cpu" if self.device is None else self.device)
        ) as file:
            tensor: torch.Tensor = file.get_tensor(info.get("weight_name", key))
        return tensor.to(getattr(torch, info["dtype"])) if "dtype" in info else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def _file(self, name: str) -> Path:
        folder = Path("" if self.save_folder is None else self.save_folder)
        if self._from_folder:
            return listed_file(folder, name, folder / INDEX)
        return folder / name  # the caller's own index may name any file
