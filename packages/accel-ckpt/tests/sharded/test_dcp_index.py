"""The index of a folder of torch.distributed.checkpoint, written part by part."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from accel_ckpt.errors import CheckpointError
from accel_ckpt.sharded import dcp_index
from accel_ckpt.sharded.dcp_index import WrittenShard, write_index
from accel_ckpt.sharded.dcp_reader import METADATA, read_metadata

pytestmark = pytest.mark.core


def written(folder: Path, state: dict[str, Any], *parts: list[WrittenShard]) -> Metadata:
    """Write an index, and let torch read it."""
    write_index(folder, state, {name: (name,) for name in state}, [pickle.dumps(one) for one in parts])
    return FileSystemReader(folder).read_metadata()


def row_of(name: str, process: int, offset: int) -> WrittenShard:
    """The row of a process, of a tensor of two columns."""
    return WrittenShard(name, (process, 0), (1, 2), f"__{process}_0.distcp", offset, 8)


def test_an_index_has_all_parts(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    state = {name: torch.zeros(4, 2) for name in names} | {"lr": 0.1}
    value = WrittenShard("lr", None, None, "__1_0.distcp", 99, 1)
    parts = [[row_of(name, process, turn * 8) for turn, name in enumerate(names)] for process in range(4)]
    parts[1].append(value)

    index = written(tmp_path, state, *parts)

    assert index.storage_data == {
        MetadataIndex(part.name, part.begin): _StorageInfo(part.file, part.offset, part.length)
        for one in parts
        for part in one
    }
    for name in names:
        chunks = index.state_dict_metadata[name].chunks
        assert chunks == [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 2])) for row in range(4)]
        # The number of a part is its place among those of its tensor.
        places = [place for place in index.storage_data if place.fqn == name]
        assert [chunks[place.index].offsets for place in places] == [place.offset for place in places]
    assert index.planner_data == {name: (name,) for name in state}
    for part in (part for one in parts for part in one):  # so large do the files have to be
        (tmp_path / part.file).write_bytes(b" " * 100)
    assert read_metadata(tmp_path).storage_data == index.storage_data


@pytest.mark.parametrize(("processes", "tensors"), [(256, 20), (4, 1000), (1, 5000)])
def test_memory_and_file_stay_small_with_many_parts(tmp_path: Path, processes: int, tensors: int) -> None:
    """A part costs the file less than its names would, and the memory little while it is written."""
    names = [f"model.layers.{number}.self_attn.q_proj.weight.exp_avg" for number in range(tensors)]
    state = {name: torch.zeros(processes, 2) for name in names}
    sent = [
        pickle.dumps([row_of(name, process, turn * 8) for turn, name in enumerate(names)])
        for process in range(processes)
    ]
    number = processes * tensors
    write_index(tmp_path, state, {}, sent)  # imports, once
    size = (tmp_path / METADATA).stat().st_size
    tracemalloc.start()
    write_index(tmp_path, state, {}, sent)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    # Of each tensor torch's objects and those of the pickler, of each part a place in a list. Torch's objects
    # of a part take 700 bytes, and more while they are pickled.
    assert peak < 2500 * tensors + 100 * number + 1_000_000
    assert size < 160 * tensors + 55 * number
    assert len(FileSystemReader(tmp_path).read_metadata().storage_data) == number


def test_nothing_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without the garbage collector, which finds no cycle through a pickler in Python 3.10."""
    seen: list[weakref.ref[Any]] = []

    def watched(kind: type) -> type:
        def init(self: Any, *args: Any) -> None:
            kind.__init__(self, *args)
            seen.append(weakref.ref(self))

        return type(kind.__name__, (kind,), {"__init__": init})

    for name in ("_StorageData", "_Pickler"):
        monkeypatch.setattr(dcp_index, name, watched(getattr(dcp_index, name)))
    gc.disable()
    try:
        written(tmp_path, {"x": torch.zeros(1, 2)}, [row_of("x", 0, 0)])
        assert [item() for item in seen] == [None, None]
    finally:
        gc.enable()


def test_a_save_that_fails_leaves_the_index_that_was_there(tmp_path: Path) -> None:
    state, parts = {"x": torch.zeros(1, 2)}, [row_of("x", 0, 0)]
    written(tmp_path, state, parts)
    (tmp_path / "link").hardlink_to(tmp_path / METADATA)
    before = (tmp_path / METADATA).read_bytes()

    full = mock.patch.object(dcp_index._StorageData, "_items", side_effect=OSError("full"))
    with full, pytest.raises(OSError, match="full"):
        written(tmp_path, state, parts)
    assert {path.name for path in tmp_path.iterdir()} == {METADATA, "link"}
    assert (tmp_path / METADATA).read_bytes() == before

    written(tmp_path, {"y": torch.zeros(1, 2)}, [row_of("y", 0, 0)])
    assert (tmp_path / "link").read_bytes() == before


def test_missing_parts_are_an_error_and_no_index_is_written(tmp_path: Path) -> None:
    whole = WrittenShard("x", (0,), (4,), "__0_0.distcp", 0, 16)
    half = whole._replace(shape=(2,))
    state = {"x": torch.zeros(4), "y": 1}
    value = WrittenShard("y", None, None, "__0_0.distcp", 16, 1)
    for parts in ([half, value], [whole], [whole, value, value]):
        with pytest.raises(CheckpointError, match=r"have written [02] elements of [xy]"):
            written(tmp_path, state, parts)
        assert not (tmp_path / METADATA).exists()
    written(tmp_path, state, [whole], [value])


@pytest.mark.parametrize(
    ("begins", "shape"), [([0, 0], (2,)), ([0, 1], (2,)), ([0, 3], (2,))], ids=["twice", "over", "outside"]
)
def test_parts_over_each_other_or_outside_are_an_error(
    tmp_path: Path, begins: list[int], shape: tuple[int, ...]
) -> None:
    """Their elements are as many as those of the tensor."""
    parts = [WrittenShard("x", (begin,), shape, "__0_0.distcp", 0, 1) for begin in begins]
    with pytest.raises(CheckpointError, match="shards of x overlap or exceed its shape"):
        written(tmp_path, {"x": torch.zeros(4)}, parts)


def test_small_types_are_pickled_as_torchs() -> None:
    begin, shape = torch.Size([1]), torch.Size([2])
    for own, torchs in (
        (dcp_index._Index("x", begin, 3), MetadataIndex("x", begin, 3)),
        (dcp_index._Index("x"), MetadataIndex("x")),
        (dcp_index._Chunk(begin, shape), ChunkStorageMetadata(begin, shape)),
        (dcp_index._Info("f", 1, 2), _StorageInfo("f", 1, 2)),
    ):
        assert pickle.loads(pickle.dumps(own)) == torchs
