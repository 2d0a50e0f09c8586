"""The index of a folder of torch.distributed.checkpoint: what it has, and where its parts are.

Torch makes it of objects for each part, which Python's pickler keeps until the end. Here what the processes
have sent is read twice, to check it and to write it, and an entry exists only while it is written.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from accel_ckpt.errors import CheckpointError
from accel_ckpt.sharded.dcp_reader import METADATA


class WrittenShard(NamedTuple):
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
    """Pickled as torch's, like the next two."""

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


_Chunks = dict[tuple[tuple[int, ...], tuple[int, ...]], _Chunk]


def written_shards(results: Iterable[WriteResult], items: Iterable[WriteItem]) -> list[WrittenShard]:
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
        WrittenShard(
            result.index.fqn,
            None if result.index.offset is None else tuple(result.index.offset),
            shapes[result.index],
            result.storage_data.relative_path,
            result.storage_data.offset,
            result.storage_data.length,
        )
        for result in results
    ]


def write_index(
    folder: Path,
    state: Mapping[str, Any],
    paths: Mapping[str, Any],
    sent: Sequence[bytes],
    storage_meta: StorageMeta | None = None,
) -> None:
    """Write the index of a folder from what all processes have written. The main process calls this.

    It is not flushed to the disk.

    Args:
        folder: The folder.
        state: The flat state dict of this process.
        paths: For each name, its keys in the nested one.
        sent: For each process the list of what it has written (`WrittenShard`), pickled.
        storage_meta: What torch's writer says of itself.

    Raises:
        CheckpointError: If parts are missing, or lie over each other.
        OSError: If it cannot be written. After an error the folder is as it was before.
    """
    saved: dict[str, Any] = {}
    for item in create_default_local_save_plan(dict(state), is_coordinator=True).items:
        data = item.tensor_data
        saved[item.index.fqn] = (
            BytesStorageMetadata() if data is None else TensorStorageMetadata(data.properties, data.size, [])
        )
    chunks: _Chunks = {}
    elements = Counter[str]()
    for name, chunk, _ in _parts(saved, chunks, sent):
        if chunk is not None:
            saved[name].chunks.append(chunk)
        elements[name] += 1 if chunk is None else chunk.shape.numel()
    for name, entry in saved.items():
        _require_whole(name, entry, elements[name])

    index = Metadata(saved, dict(paths), _Places(_parts(saved, chunks, sent)), storage_meta)
    if hasattr(filesystem, "CURRENT_DCP_VERSION"):  # torch 2.6 has none
        index.version = filesystem.CURRENT_DCP_VERSION
    draft = folder / f"{METADATA}.tmp"
    try:
        with draft.open("wb") as file:
            _Pickler(file).dump(index)
        draft.replace(folder / METADATA)
    finally:
        draft.unlink(missing_ok=True)


def _parts(
    names: Iterable[str], chunks: _Chunks, sent: Iterable[bytes]
) -> Iterator[tuple[str, _Chunk | None, WrittenShard]]:
    """Iterate over all parts, with their names and places in their tensors.

    Of each name, and of parts alike in several tensors, it yields one object: the pickler writes it once.
    """
    same_names = {name: name for name in names}
    without: set[tuple[str, torch.Size]] = set()
    for parts in map(pickle.loads, sent):
        for part in parts:
            name = same_names[part.name]
            if part.begin is None or part.shape is None:
                yield name, None, part
                continue
            key = part.begin, part.shape
            chunk = chunks.get(key) or chunks.setdefault(key, _Chunk(*map(torch.Size, key)))
            if 0 in chunk.shape:  # of a tensor without elements, which several processes have
                if (name, chunk.begin) in without:
                    continue
                without.add((name, chunk.begin))
            yield name, chunk, part


class _Places:
    """Where the parts are: pickled as an ordered dict of torch's objects, each made when it is written.

    Args:
        parts: The parts, which can be iterated over once.
    """

    def __init__(self, parts: Iterator[tuple[str, _Chunk | None, WrittenShard]]) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        # The readers of accel 0.2 take this type by name, and not `dict`.
        return OrderedDict, (), None, None, self._items()

    def _items(self) -> Iterator[tuple[_Index, _Info]]:
        numbers = Counter[str]()
        for name, chunk, part in self._parts:
            if chunk is None:
                index = _Index(name)
            else:
                index = _Index(name, chunk.begin, numbers[name])
                numbers[name] += 1
            yield index, _Info(part.file, part.offset, part.length)


class _Pickler(pickle.Pickler):
    """Keeps what is written again: types, names, places of parts, and the name of each file.

    Python's pickler keeps everything that it writes, to refer to it. A `fast` one refers to what it has kept,
    and keeps no more. That is how Python does it, and no promise of its manual, which calls `fast` deprecated
    and warns of objects that contain themselves.
    """

    _file = ""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not _Info:
            return NotImplemented
        # Here and not in `_items`, as the pickler takes two entries from that before it writes the first.
        self.fast = obj.file == self._file
        self._file = obj.file
        return obj.__reduce__()


def _require_whole(name: str, entry: Any, elements: int) -> None:
    """Raise unless the parts of a tensor, or of a value, are all of it."""
    if isinstance(entry, TensorStorageMetadata) and not _are_apart(entry.chunks, entry.size):
        raise CheckpointError(
            f"parts of {name} overlap or lie outside of it, {[*entry.size]}: a layout that "
            "torch.distributed.checkpoint has no parts for. Redistribute the tensor, or leave it out."
        )
    expected = entry.size.numel() if isinstance(entry, TensorStorageMetadata) else 1
    if elements != expected:
        raise CheckpointError(
            f"the processes have written {elements} elements of {name}, which has {expected}: save again."
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
