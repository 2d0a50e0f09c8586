"""Who writes which part of a state, where all processes have the same tensors in the same layout.

torch.distributed.checkpoint has every process send its whole plan to the main process, which finds there what
several of them have. Here each process finds its own parts by itself, so that the main process gets no more
than the place of each part that was written.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from accel_ckpt.errors import CheckpointError
from accel_ckpt.sharded.layouts import Copy


class Written(NamedTuple):
    """A part that a process has written.

    Attributes:
        name: Of the tensor or value.
        begin: Where the part begins in the tensor, in each dimension; None for what is no tensor.
        shape: Its shape; None for what is no tensor.
        file: The file that it is in.
        offset: Where its bytes begin.
        length: How many they are.
    """

    name: str
    begin: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    file: str
    offset: int
    length: int


class _Index(NamedTuple):
    """Pickled as torch's; a tuple, and so are the next two, as there may be hundreds of thousands."""

    name: str
    begin: torch.Size | None = None
    number: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return MetadataIndex, tuple(self)


class _Chunk(NamedTuple):
    begin: torch.Size
    shape: torch.Size

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkStorageMetadata, tuple(self)


class _Info(NamedTuple):
    file: str
    offset: int
    length: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _StorageInfo, tuple(self)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part is, as far as torch's writer asks for it."""

    index: _Index
    storage_data: _Info


def own_items(
    state: Mapping[str, Any], copies: Mapping[DeviceMesh, Copy], rank: int, size: int
) -> list[WriteItem]:
    """Choose what a process writes: every part once, and about as much by each process.

    Args:
        state: The flat state dict, of one layout on all processes.
        copies: For each mesh, which copy it is; see `common_copies`.
        rank: The process.
        size: How many there are.
    """
    # By what such tensors share: which copy of its part this process has, and their bytes.
    kinds: dict[Any, tuple[Copy, dict[str, int]]] = {}
    for name, value in state.items():
        kind: Any = None
        copy = Copy(rank, size)
        if isinstance(value, DTensor):
            kind = value.device_mesh, value.placements
            copy = _copy_of(value, copies[value.device_mesh])
        nbytes = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
        kinds.setdefault(kind, (copy, {}))[1][name] = nbytes
    chosen: dict[str, Any] = {}
    for copy, sizes in kinds.values():
        writers = writers_of(sizes, copy.copies)
        chosen |= {name: state[name] for name, writer in writers.items() if writer == copy.number}
    items = create_default_local_save_plan(chosen, is_coordinator=False).items
    # A tensor with fewer rows than processes leaves some without any.
    return [item for item in items if not _is_empty_part(item)]


def writers_of(sizes: Mapping[str, int], copies: int) -> dict[str, int]:
    """Choose which of the processes that have the same part of tensors writes it.

    Large ones come first, and each goes to whoever has least by then (longest processing time first, Graham
    1969, https://doi.org/10.1137/0117039).

    Args:
        sizes: Bytes of each tensor, by name.
        copies: How many processes have each part.

    Returns:
        The number of the copy that is written, by name.
    """
    loads = [(0, copy) for copy in range(copies)]  # a heap
    chosen = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, copy = loads[0]
        heapq.heapreplace(loads, (load + max(sizes[name], 1), copy))
        chosen[name] = copy
    return chosen


def _copy_of(value: DTensor, copy: Copy) -> Copy:
    """Return which copy of its part this process has, of those in all copies of its mesh."""
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # or there would be no common layout
    number, count = copy
    for dim, placement in enumerate(value.placements):
        if placement.is_replicate():
            number = number * mesh.size(dim) + coordinate[dim]
            count *= mesh.size(dim)
    return Copy(number, count)


def _is_empty_part(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and data.size.numel() > 0 and data.chunk.sizes.numel() == 0


def written_by(results: Iterable[WriteResult], items: Iterable[WriteItem]) -> list[Written]:
    """Describe what torch says that it has written, in plain values, which take little to send.

    Args:
        results: What torch says.
        items: What it was to write.
    """
    shapes = {
        item.index: None if item.tensor_data is None else tuple(item.tensor_data.chunk.sizes)
        for item in items
    }
    return [
        Written(
            result.index.fqn,
            None if result.index.offset is None else tuple(result.index.offset),
            shapes[result.index],
            result.storage_data.relative_path,
            result.storage_data.offset,
            result.storage_data.length,
        )
        for result in results
    ]


def make_index(
    state: Mapping[str, Any], paths: Mapping[str, Any], written: Iterable[Iterable[Written]]
) -> tuple[Metadata, Iterator[list[Place]]]:
    """Make the index of a folder from the parts that all processes have written.

    Args:
        state: The flat state dict of the main process.
        paths: For each name, its keys in the nested one.
        written: The parts of each process.

    Returns:
        (index, places): the index, and where the parts are, as torch's writer takes it. The index has all
        parts once the places were iterated over, which raises a CheckpointError if some are missing.
    """
    saved: dict[str, Any] = {}
    for item in create_default_local_save_plan(dict(state), is_coordinator=True).items:
        data = item.tensor_data
        saved[item.index.fqn] = (
            BytesStorageMetadata() if data is None else TensorStorageMetadata(data.properties, data.size, [])
        )
    return Metadata(saved, planner_data=dict(paths)), _places(saved, written)


def _places(saved: dict[str, Any], written: Iterable[Iterable[Written]]) -> Iterator[list[Place]]:
    # Of each text, and of parts alike in several tensors, one object: once in memory, and once in the file.
    names = {name: name for name in saved}
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], _Chunk] = {}
    without: set[tuple[str, torch.Size]] = set()
    elements = Counter[str]()
    for parts in written:
        places = []
        for part in parts:
            name = names[part.name]
            if part.begin is None or part.shape is None:
                index = _Index(name)
                elements[name] += 1
            else:
                key = part.begin, part.shape
                chunk = chunks.get(key) or chunks.setdefault(key, _Chunk(*map(torch.Size, key)))
                if 0 in chunk.shape:  # of a tensor without elements, which several processes have
                    if (name, chunk.begin) in without:
                        continue
                    without.add((name, chunk.begin))
                index = _Index(name, chunk.begin, len(saved[name].chunks))
                saved[name].chunks.append(chunk)
                elements[name] += chunk.shape.numel()
            places.append(Place(index, _Info(part.file, part.offset, part.length)))
        yield places
    for name, entry in saved.items():
        if isinstance(entry, TensorStorageMetadata) and not _are_apart(entry.chunks, entry.size):
            raise CheckpointError(
                f"parts of {name} overlap or lie outside of it, {[*entry.size]}: a layout that "
                "torch.distributed.checkpoint has no parts for. Redistribute the tensor, or leave it out."
            )
        expected = entry.size.numel() if isinstance(entry, TensorStorageMetadata) else 1
        if elements[name] != expected:
            raise CheckpointError(
                f"the processes have written {elements[name]} elements of {name}, which has {expected}: save "
                "again."
            )


def _are_apart(chunks: Iterable[Any], size: torch.Size) -> bool:
    """Whether parts lie in a tensor, and none over another."""
    parts = [chunk for chunk in chunks if 0 not in chunk.shape]
    if any(begin + length > end for part in parts for begin, length, end in zip(*part, size, strict=True)):
        return False
    if not size:
        return len(parts) < 2
    # Along the axis with most places to begin at, few parts are at one place.
    axis = max(range(len(size)), key=lambda axis: len({part.begin[axis] for part in parts}))
    open_parts: list[Any] = []
    for part in sorted(parts, key=lambda part: part.begin[axis]):
        open_parts = [other for other in open_parts if _end(other, axis) > part.begin[axis]]
        if any(_meet(part, other) for other in open_parts):
            return False
        open_parts.append(part)
    return True


def _end(part: _Chunk, axis: int) -> int:
    return part.begin[axis] + part.shape[axis]


def _meet(one: _Chunk, other: _Chunk) -> bool:
    return all(
        one.begin[axis] < _end(other, axis) and other.begin[axis] < _end(one, axis)
        for axis in range(len(one.begin))
    )
