"""Registered objects whose state has sharded tensors (DTensor), such as an average of sharded weights.

    custom_checkpoint_0.pkl   the state, with placeholders for sharded tensors
    custom_checkpoint_0/      those tensors, a folder of torch.distributed.checkpoint

Each process writes its shards. They are read in the layout of the object's current state, on any number of
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch.distributed.tensor import DTensor, distribute_tensor

from accel_ckpt import file_names
from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import values
from accel_ckpt.folder.all_ranks import all_gather_object, run_on_all_ranks
from accel_ckpt.folder.staging import Staging
from accel_ckpt.sharded.dcp_folder import read_folder, read_index
from accel_ckpt.sharded.save_load import write_sharded
from accel_ops.trees.walk import children, keys, rebuild
from accel_state.process.info import ProcessInfo

# The key of a dict that is the placeholder of a sharded tensor; unlikely as the only key of a user's dict.
_NAME = "accel_ckpt.part"


def save_registered(item: Any, index: int, staging: Staging, process: ProcessInfo) -> None:
    """Write an object's state, which may be sharded. Every process must call it.

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

    # On all ranks: the next object begins with a collective, which would hang if this rank failed alone.
    run_on_all_ranks(write, process, f"writing {file_names.custom_file(index)}")


def check_same_on_all_ranks(obj: Any, index: int, state: Any, process: ProcessInfo) -> None:
    """Reject floating-point tensors that differ between processes. Every process must call it.

    Such tensors are local shards, and a checkpoint keeps only those of the first process. Integers may
    differ, as counters and states of random generators do.

    Args:
        obj: The registered object.
        index: Its number.
        state: Its state.
        process: This process.

    Raises:
        ValueError: If one differs.
    """
    # DTensors are expected to differ, and are saved sharded.
    local = {
        path: digest(tensor)
        for path, tensor in _tensors(state).items()
        if not isinstance(tensor, DTensor) and (tensor.is_floating_point() or tensor.is_complex())
    }
    per_rank = all_gather_object(local, process)
    if any(other != local for other in per_rank):
        paths = dict.fromkeys(path for digests in per_rank for path in digests)
        path = next(path for path in paths if len({digests.get(path) for digests in per_rank}) > 1)
        shapes = [digests[path][0] if path in digests else None for digests in per_rank]
        raise ValueError(
            f"The state of registered object {index} ({type(obj).__name__}) differs between processes in "
            f"{path}, of the shapes {shapes}: a checkpoint keeps only the first process's tensors. If it is "
            "a shard of a sharded model's parameters, keep DTensors (parameter.detach().clone() with "
            "fsdp_version=2) or full tensors (accelerator.get_state_dict(model)); if each process has its "
            "own, gather it in state_dict() (accelerator.gather)."
        )


def save_registered_shards(index: int, state: Any, staging: Staging, process: ProcessInfo) -> Any:
    """Write the sharded tensors of a state. Every process must call it.

    Args:
        index: The number of the registered object.
        state: Its state.
        staging: The checkpoint's folder.
        process: This process.

    Returns:
        The state with placeholders instead of those tensors.
    """
    shards: dict[str, DTensor] = {}

    def take(path: str, tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        # Numbered, not named by their path: the path has dots and quotes, and DCP joins names with dots.
        name = str(len(shards))
        shards[name] = cast("DTensor", tensor.detach())
        return {_NAME: name}

    rest = _map(take, state)
    if shards:
        write_sharded({"parts": shards}, file_names.custom_folder(index), staging, process)
    return rest


def load_registered_shards(
    obj: Any,
    index: int,
    saved: Any,
    folder: Path,
    names: Collection[str],
    sharded: bool,
    process: ProcessInfo,
) -> Any:
    """Return a saved state in the layout of the object's current state.

    Every process must call it.

    Args:
        obj: The registered object.
        index: Its number.
        saved: The content of its file.
        folder: The checkpoint's folder, checked.
        names: Its files.
        sharded: Whether models are sharded now.
        process: This process.

    Returns:
        The state: tensors are sharded where those of the current state are.

    Raises:
        CheckpointError: If the folder does not have a tensor that the file names, or models are sharded now
            and the current state has no DTensor for one that was saved sharded.
    """
    current = _tensors(run_on_all_ranks(obj.state_dict, process, f"state_dict of registered object {index}"))
    shard_folder = folder / file_names.custom_folder(index)
    shards: dict[str, torch.Tensor] = {}
    # Without the folder, nothing was sharded when it was saved.
    if any(name.startswith(f"{shard_folder.name}/") for name in names):
        index_read = read_index(shard_folder, process)
        entries: dict[str, Any] = {
            name.removeprefix("parts."): entry for name, entry in index_read.state_dict_metadata.items()
        }
        paths = {value[_NAME]: path for path, value in _tensors(saved).items() if isinstance(value, dict)}
        for name, path in paths.items():
            if sharded and not _fits(current.get(path), entries[name]):
                raise CheckpointError(
                    f"{file_names.custom_file(index)}: {path} was saved sharded, and registered object "
                    f"{index} ({type(obj).__name__}) has no DTensor of shape {tuple(entries[name].size)} "
                    "there now, while models are sharded. Create its tensors before load_state, as in the "
                    "run that saved; prepare an optimizer instead of registering it."
                )
            shards[name] = _empty(current.get(path), entries[name])
        read_folder({"parts": shards}, shard_folder, process, index_read)

    def put(path: str, value: Any) -> Any:
        return shards[value[_NAME]] if isinstance(value, dict) else _shard_like(value, current.get(path))

    return _map(put, saved)


def _map(function: Callable[[str, Any], Any], node: Any, path: str = "state") -> Any:
    """Apply a function to each tensor or placeholder of a state, with its path as code."""
    if isinstance(node, torch.Tensor) or (isinstance(node, dict) and node.keys() == {_NAME}):
        return function(path, node)
    inside = children(node)
    if inside is None:
        return node
    paths = [f"{path}[{key!r}]" for key in keys(node)]
    # Rebuilt in the node's type: namedtuples and OrderedDicts keep theirs.
    return rebuild(node, [_map(function, *pair) for pair in zip(inside, paths, strict=True)])


def _tensors(state: Any) -> dict[str, Any]:
    """Return the tensors and placeholders of a state, by path."""
    tensors: dict[str, Any] = {}

    def record(path: str, tensor: Any) -> Any:
        tensors[path] = tensor
        return tensor

    _map(record, state)
    return tensors


def _shard_like(value: torch.Tensor, current: Any) -> torch.Tensor:
    """Shard a full tensor, which every process has, if the current one is sharded."""
    if not isinstance(current, DTensor) or current.shape != value.shape:
        return value
    full = value.to(current.device_mesh.device_type)
    # None: each process takes its part of what it has.
    return distribute_tensor(full, current.device_mesh, current.placements, src_data_rank=None)


def _fits(current: Any, entry: Any) -> bool:
    return isinstance(current, DTensor) and current.shape == entry.size


def _empty(current: Any, entry: Any) -> torch.Tensor:
    """Return a tensor to read into: in the layout of the current one, or full."""
    dtype = entry.properties.dtype
    if isinstance(current, torch.Tensor) and current.shape == entry.size:
        return torch.empty_like(current, dtype=dtype).detach()
    return torch.empty(entry.size, dtype=dtype)


def digest(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """Return the shape of a tensor, and a digest of its bits."""
    shape = tuple(tensor.shape)
    if tensor.is_meta or not tensor.numel():
        return shape, ""
    # resolve_conj and resolve_neg: lazily conjugated or negated tensors cannot be viewed as bytes.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten()
    return shape, xxhash.xxh3_128_hexdigest(plain.view(torch.uint8).numpy())  # type: ignore[arg-type]
