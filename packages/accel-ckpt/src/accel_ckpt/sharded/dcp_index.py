"""The index of a folder of torch.distributed.checkpoint: its entries, and the locations of their shards.

torch builds it from objects of each shard, which Python's pickler keeps until the end. Here the lists of the
processes are read twice, to check and to write them, and an entry exists only while it is written.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
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
    """A shard that a process has written.

    Attributes:
        name: The name of the tensor or value.
        begin: Its offset in the tensor, in each dimension; None for non-tensors.
        shape: Its shape; None for non-tensors.
        file: The file that contains it.
        offset: The offset of its bytes.
        length: The number of bytes.
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
    """Convert torch's write results to plain values, which are small to send.

    Args:
        results: The results.
        items: The write items.
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
    """Write the index of a folder from the shards of all processes. The main process calls this.

    It is not flushed to the disk.

    Args:
        folder: The folder.
        state: The flat state dict of this process.
        paths: For each name, its keys in the nested state dict.
        sent: For each process its pickled list of `WrittenShard`.
        storage_meta: The metadata of torch's writer.

    Raises:
        CheckpointError: If shards are missing or overlap.
        OSError: If it cannot be written. After an error the folder is unchanged.
    """
    saved: dict[str, Any] = {}
    for item in create_default_local_save_plan(dict(state), is_coordinator=True).items:
        data = item.tensor_data
        saved[item.index.fqn] = (
            BytesStorageMetadata() if data is None else TensorStorageMetadata(data.properties, data.size, [])
        )
    chunks: _Chunks = {}
    elements = Counter[str]()
    for name, chunk, _ in _shards(saved, chunks, sent):
        if chunk is not None:
            saved[name].chunks.append(chunk)
        elements[name] += 1 if chunk is None else chunk.shape.numel()
    for name, entry in saved.items():
        _check_complete(name, entry, elements[name])

    index = Metadata(saved, dict(paths), _StorageData(_shards(saved, chunks, sent)), storage_meta)
    index.version = CURRENT_DCP_VERSION
    draft = folder / f"{METADATA}.tmp"
    try:
        with draft.open("wb") as file:
            _Pickler(file).dump(index)
        draft.replace(folder / METADATA)
    finally:
        draft.unlink(missing_ok=True)


def _shards(
    names: Iterable[str], chunks: _Chunks, sent: Iterable[bytes]
) -> Iterator[tuple[str, _Chunk | None, WrittenShard]]:
    """Iterate over all shards, with their names and positions in their tensors.

    Equal names, and equal chunks of several tensors, are one object, which the pickler writes once.
    """
    same_names = {name: name for name in names}
    empty: set[tuple[str, torch.Size]] = set()
    for shards in map(pickle.loads, sent):
        for shard in shards:
            name = same_names[shard.name]
            if shard.begin is None or shard.shape is None:
                yield name, None, shard
                continue
            key = shard.begin, shard.shape
            chunk = chunks.get(key) or chunks.setdefault(key, _Chunk(*map(torch.Size, key)))
            if 0 in chunk.shape:  # of a tensor without elements, which several processes have
                if (name, chunk.begin) in empty:
                    continue
                empty.add((name, chunk.begin))
            yield name, chunk, shard


class _StorageData:
    """The locations of shards: pickled as an ordered dict of torch's objects, each created when written.

    Args:
        shards: The shards; an iterator.
    """

    def __init__(self, shards: Iterator[tuple[str, _Chunk | None, WrittenShard]]) -> None:
        self._iterator = shards

    def __reduce__(self) -> tuple[Any, ...]:
        # The reader of accel 0.2 accepts this type by name, but not `dict`.
        return OrderedDict, (), None, None, self._items()

    def _items(self) -> Iterator[tuple[_Index, _Info]]:
        numbers = Counter[str]()
        for name, chunk, shard in self._iterator:
            if chunk is None:
                index = _Index(name)
            else:
                index = _Index(name, chunk.begin, numbers[name])
                numbers[name] += 1
            yield index, _Info(shard.file, shard.offset, shard.length)


class _Pickler(pickle.Pickler):
    """Memoizes only what is written again: types, names, chunks, and the name of each file.

    Python's pickler memoizes everything that it writes. A `fast` one uses its memo, but adds nothing to it.
    This is behaviour of the implementation: the manual calls `fast` deprecated and warns of recursive
    objects.
    """

    _file = ""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not _Info:
            return NotImplemented
        # Not in `_items`, as the pickler takes two entries from it before it writes the first.
        self.fast = obj.file == self._file
        self._file = obj.file
        return obj.__reduce__()


def _check_complete(name: str, entry: Any, elements: int) -> None:
    """Raise unless the shards of a tensor or value are complete."""
    if isinstance(entry, TensorStorageMetadata) and not _are_disjoint(entry.chunks, entry.size):
        raise CheckpointError(
            f"shards of {name} overlap or exceed its shape {[*entry.size]}: "
            "torch.distributed.checkpoint does not support this layout. Redistribute the tensor, or omit it."
        )
    expected = entry.size.numel() if isinstance(entry, TensorStorageMetadata) else 1
    if elements != expected:
        raise CheckpointError(
            f"the processes have written {elements} elements of {name}, which has {expected}: save again."
        )


def _are_disjoint(chunks: Iterable[Any], size: torch.Size) -> bool:
    """Whether shards are inside a tensor, and do not overlap."""
    shards = [chunk for chunk in chunks if 0 not in chunk.shape]
    if any(begin + length > end for shard in shards for begin, length, end in zip(*shard, size, strict=True)):
        return False
    if not size:
        return len(shards) < 2
    # Along the axis with most distinct offsets, few shards have the same offset.
    axis = max(range(len(size)), key=lambda axis: len({shard.begin[axis] for shard in shards}))
    active: list[Any] = []
    for shard in sorted(shards, key=lambda shard: shard.begin[axis]):
        active = [other for other in active if _end(other, axis) > shard.begin[axis]]
        if any(_overlap(shard, other) for other in active):
            return False
        active.append(shard)
    return True


def _end(chunk: _Chunk, axis: int) -> int:
    return chunk.begin[axis] + chunk.shape[axis]


def _overlap(one: _Chunk, other: _Chunk) -> bool:
    return all(
        one.begin[axis] < _end(other, axis) and other.begin[axis] < _end(one, axis)
        for axis in range(len(one.begin))
    )
