"""Registered objects whose state holds tensors in parts (DTensor), such as an average of sharded weights.

    custom_checkpoint_0.pkl   the state; what is in parts is named there
    custom_checkpoint_0/      those tensors, a folder of torch.distributed.checkpoint

Each process writes its part. They are read in the layout that the object's state has then, on any number of
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch.distributed.tensor import DTensor

from accel_ckpt import file_names
from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import values
from accel_ckpt.folder.all_ranks import all_gather_object, run_on_all_ranks
from accel_ckpt.folder.staging import Staging
from accel_ckpt.sharded.dcp_folder import read_folder, read_index
from accel_ckpt.sharded.save_load import write_sharded
from accel_ops.torch_compat import shard_replicated
from accel_ops.trees.walk import children, keys, rebuild
from accel_state.process.info import ProcessInfo

# The key of a dict that stands for a tensor in parts; unlikely as the only key of a user's dict.
_NAME = "accel_ckpt.part"


def save_registered(item: Any, index: int, staging: Staging, process: ProcessInfo) -> None:
    """Write an object's state, of which each process may have a part. Every process must call it.

    Args:
        item: The object, with a `state_dict`.
        index: Its number, for the name of its file.
        staging: The checkpoint that is being written.
        process: This process.
    """
    state = run_on_all_ranks(item.state_dict, process, f"state_dict of registered object {index}")
    check_same_on_all_ranks(item, index, state, process)
    state = save_registered_shards(index, state, staging, process)

    def write() -> None:
        if staging.writes_shared:
            what = f"registered object {index} ({type(item).__name__})"
            staging.write(values.encode(state, what), file_names.custom_file(index))

    # Together, as the next object begins with a collective, which a full disk here must not leave waiting.
    run_on_all_ranks(write, process, f"writing {file_names.custom_file(index)}")


def check_same_on_all_ranks(obj: Any, index: int, state: Any, process: ProcessInfo) -> None:
    """Reject floating-point tensors that differ between processes. Every process must call it.

    They are a process's own parts of something, and a checkpoint keeps those of the first process alone.
    Integers may differ: counts and the states of random generators do.

    Args:
        obj: The registered object.
        index: Its number.
        state: Its state.
        process: This process.

    Raises:
        ValueError: If there are some.
    """
    # DTensors are meant to differ, and are written in parts.
    own = {
        path: digest(tensor)
        for path, tensor in _tensors(state).items()
        if not isinstance(tensor, DTensor) and (tensor.is_floating_point() or tensor.is_complex())
    }
    everyone = all_gather_object(own, process)
    if any(other != own for other in everyone):
        paths = dict.fromkeys(path for found in everyone for path in found)
        path = next(path for path in paths if len({found.get(path) for found in everyone}) > 1)
        shapes = [found[path][0] if path in found else None for found in everyone]
        raise ValueError(
            f"The state of registered object {index} ({type(obj).__name__}) differs between processes in "
            f"{path}, of the shapes {shapes}: a checkpoint keeps the first process's tensors alone. If it is "
            "a part of a sharded model's parameters, keep DTensors (parameter.detach().clone() with "
            "fsdp_version=2) or whole tensors (accelerator.get_state_dict(model)); if it is each process's "
            "own, let state_dict() gather it (accelerator.gather)."
        )


def save_registered_shards(index: int, state: Any, staging: Staging, process: ProcessInfo) -> Any:
    """Write the tensors of a state that are in parts. Every process must call it.

    Args:
        index: The number of the registered object.
        state: Its state.
        staging: The checkpoint's folder.
        process: This process.

    Returns:
        The state with names in the places of those tensors.
    """
    parts: dict[str, DTensor] = {}

    def take(path: str, tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        # Numbered, not named by their place: the place has dots and quotes, and DCP joins names with dots.
        name = str(len(parts))
        parts[name] = cast("DTensor", tensor.detach())
        return {_NAME: name}

    left = _map(take, state)
    if parts:
        write_sharded({"parts": parts}, file_names.custom_folder(index), staging, process)
    return left


def load_registered_shards(
    obj: Any,
    index: int,
    saved: Any,
    folder: Path,
    names: Collection[str],
    sharded: bool,
    process: ProcessInfo,
) -> Any:
    """Lay a state out as the object's present one is, with the tensors that were saved in parts.

    Every process must call it.

    Args:
        obj: The registered object.
        index: Its number.
        saved: What its file holds.
        folder: The checkpoint's folder, checked.
        names: Its files.
        sharded: Whether models are sharded here.
        process: This process.

    Returns:
        The state: tensors are in parts where those of the present state are.

    Raises:
        CheckpointError: If the folder does not have what the file names, or models are sharded here and the
            present state has no place for a tensor that was saved in parts.
    """
    present = _tensors(run_on_all_ranks(obj.state_dict, process, f"state_dict of registered object {index}"))
    place = folder / file_names.custom_folder(index)
    parts: dict[str, torch.Tensor] = {}
    # A folder that is not there: nothing was in parts when it was saved.
    if any(name.startswith(f"{place.name}/") for name in names):
        index_read = read_index(place, process)
        entries: dict[str, Any] = {
            name.removeprefix("parts."): entry for name, entry in index_read.state_dict_metadata.items()
        }
        paths = {value[_NAME]: path for path, value in _tensors(saved).items() if isinstance(value, dict)}
        for name, path in paths.items():
            if sharded and not _fits(present.get(path), entries[name]):
                raise CheckpointError(
                    f"{file_names.custom_file(index)}: {path} was saved in parts, and registered object "
                    f"{index} ({type(obj).__name__}) has no DTensor of shape {tuple(entries[name].size)} "
                    "there now, while models are sharded. Make its tensors before load_state, as in the run "
                    "that saved; an optimizer is prepared instead of registered."
                )
            parts[name] = _empty(present.get(path), entries[name])
        read_folder({"parts": parts}, place, process, index_read)

    def put(path: str, value: Any) -> Any:
        return parts[value[_NAME]] if isinstance(value, dict) else _laid_out(value, present.get(path))

    return _map(put, saved)


def _map(function: Callable[[str, Any], Any], node: Any, path: str = "state") -> Any:
    """Apply a function to each tensor of a state, and to what stands for one, with its place as code."""
    if isinstance(node, torch.Tensor) or (isinstance(node, dict) and node.keys() == {_NAME}):
        return function(path, node)
    inside = children(node)
    if inside is None:
        return node
    places = [f"{path}[{key!r}]" for key in keys(node)]
    # Rebuilt in the node's own type: namedtuples and OrderedDicts come out as they were.
    return rebuild(node, [_map(function, *pair) for pair in zip(inside, places, strict=True)])


def _tensors(state: Any) -> dict[str, Any]:
    """The tensors of a state, and what stands for one, by their place."""
    found: dict[str, Any] = {}

    def note(path: str, tensor: Any) -> Any:
        found[path] = tensor
        return tensor

    _map(note, state)
    return found


def _laid_out(value: torch.Tensor, present: Any) -> torch.Tensor:
    """A whole tensor, which every process has, in parts where the present one is."""
    if not isinstance(present, DTensor) or present.shape != value.shape:
        return value
    whole = value.to(present.device_mesh.device_type)
    return shard_replicated(whole, present.device_mesh, present.placements)


def _fits(present: Any, entry: Any) -> bool:
    return isinstance(present, DTensor) and present.shape == entry.size


def _empty(present: Any, entry: Any) -> torch.Tensor:
    """A tensor to read into: laid out as the one that is there now, or whole."""
    dtype = entry.properties.dtype
    if isinstance(present, torch.Tensor) and present.shape == entry.size:
        return torch.empty_like(present, dtype=dtype).detach()
    return torch.empty(entry.size, dtype=dtype)


def digest(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """Return what identifies a tensor's value: its shape, and a digest of its bits."""
    shape = tuple(tensor.shape)
    if tensor.is_meta or not tensor.numel():
        return shape, ""
    # resolve_conj and resolve_neg: lazily conjugated or negated tensors cannot be viewed as bytes.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten()
    return shape, xxhash.xxh3_128_hexdigest(plain.view(torch.uint8).numpy())  # type: ignore[arg-type]
