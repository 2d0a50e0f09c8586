"""Which process writes which part, and the index of all parts."""

from __future__ import annotations

import pickle
import tempfile
from collections import Counter
from contextlib import closing, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from accel_ckpt.errors import CheckpointError
from accel_ckpt.files.writer import Writer
from accel_ckpt.sharded import dcp_folder, dcp_plan
from accel_ckpt.sharded.dcp_folder import write_folder
from accel_ckpt.sharded.dcp_index import WrittenShard, write_index
from accel_ckpt.sharded.dcp_plan import local_write_items
from accel_ckpt.sharded.layouts import common_replicas, layout_of, meshes_of
from accel_state.process.state import current_process
from accel_world.fake import fake_world

pytestmark = pytest.mark.core

# On a mesh of two dimensions, or on each of its rows or columns.
LAYOUTS: list[tuple[str, tuple[Placement, ...]]] = [
    ("", (Replicate(), Shard(0))),
    ("", (Shard(0), Replicate())),
    ("", (Shard(0), Shard(1))),
    ("", (Replicate(), Replicate())),
    ("columns", (Shard(0),)),
    ("rows", (Shard(0),)),
    ("rows", (Replicate(),)),
]


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("columns", "rows"))


def laid_out(whole: torch.Tensor, mesh: DeviceMesh, layout: tuple[str, tuple[Placement, ...]]) -> DTensor:
    part, placements = layout
    return distribute_tensor(whole, mesh[part] if part else mesh, placements)


def state_of(ones: bool = False) -> dict[str, Any]:
    """Tensors in every layout on 2 x 2 processes: uneven, of one row, without elements."""
    mesh = mesh_of((2, 2))
    state: dict[str, Any] = {"plain": torch.arange(6.0), "step": torch.tensor(3.0), "lr": 0.5, "name": "adam"}
    for number, layout in enumerate(LAYOUTS):
        for shape in ((5, 3), (1, 4), (0, 3)):
            size = shape[0] * shape[1]
            whole = torch.ones(shape) if ones else torch.arange(float(size)).view(shape) + number
            state[f"layers.{number}.{shape[0]}"] = laid_out(whole, mesh, layout)
    return {"model": state, "list": [torch.ones(2), 1]}


def save_both(folder: str) -> list[str]:
    """Save with a writer of ours, and as torch does; return the files that this process wrote with ours."""
    process = current_process()
    with closing(Writer()) as writer, mock.patch.object(dcp_folder, "save", side_effect=AssertionError):
        write_folder(state_of(), Path(folder, "own"), process, writer=writer)
        written = [entry.path for entry in writer.entries(Path(folder))]
    write_folder(state_of(), Path(folder, "torch"), process)
    return written


def read_with_torch(folder: str) -> bool:
    """Whether torch's own function reads what was saved."""
    state = state_of(ones=True)
    state["model"] |= {"plain": torch.zeros(6), "step": torch.zeros(()), "lr": 0, "name": ""}
    state["list"] = [torch.zeros(2), 0]
    load(state, checkpoint_id=folder)
    expected = state_of()
    same = [
        value.full_tensor().equal(expected["model"][name].full_tensor())
        if isinstance(value, DTensor)
        else bool(torch.as_tensor(value == expected["model"][name]).all())
        for name, value in state["model"].items()
    ]
    return all(same) and state["list"][0].tolist() == [1, 1] and state["list"][1] == 1


def test_folder_and_index_are_as_torchs(world: Any, tmp_path: Path) -> None:
    written = world.run(save_both, str(tmp_path), size=4)

    own, torchs = (FileSystemReader(tmp_path / name).read_metadata() for name in ("own", "torch"))
    assert own.planner_data == torchs.planner_data
    assert own.version == torchs.version
    assert Path(own.storage_meta.checkpoint_id) == tmp_path / "own"
    assert own.storage_meta.save_id
    assert own.state_dict_metadata.keys() == torchs.state_dict_metadata.keys()
    for name, entry in own.state_dict_metadata.items():
        other = torchs.state_dict_metadata[name]
        assert type(entry) is type(other)
        if isinstance(entry, TensorStorageMetadata):
            assert (entry.size, entry.properties) == (other.size, other.properties)
            chunks, others = (
                [(chunk.offsets, chunk.sizes) for chunk in item.chunks] for item in (entry, other)
            )
            # Torch's index has parts without elements of tensors that have some, too.
            assert sorted(chunks) == sorted(x for x in others if 0 not in x[1] or 0 in entry.size)
    files = {info.relative_path for info in own.storage_data.values()}
    assert {f"own/{file}" for file in files} == {path for paths in written for path in paths}
    assert len(files) == 4
    assert all(world.run(read_with_torch, str(tmp_path / "own"), size=4))
    # Torch's own types, also in files.
    index, info = next(item for item in own.storage_data.items() if item[0].offset is not None)
    assert (type(index), type(info)) == (MetadataIndex, _StorageInfo)
    assert type(own.state_dict_metadata["model.plain"].chunks[0]) is ChunkStorageMetadata


def save_apart(folder: str, own_name: bool) -> list[Any]:
    """Save with a name that each process has alone, or a layout that the first does not know."""
    process = current_process()
    state = {"all": torch.ones(2), f"of {process.rank if own_name else 'all'}": torch.ones(3)}
    unknown = mock.patch.object(dcp_folder, "layout_of", return_value=None)
    with (
        closing(Writer()) as writer,
        mock.patch.object(dcp_folder, "local_write_items") as chosen,
        nullcontext() if own_name or process.rank else unknown,
    ):
        write_folder(state, Path(folder), process, writer=writer)
    return [chosen.called, *sorted(FileSystemReader(folder).read_metadata().state_dict_metadata)]


@pytest.mark.parametrize(("own_name", "names"), [(True, ["of 0", "of 1"]), (False, ["of all"])])
def test_states_without_a_common_layout_are_planned_by_torch(
    world: Any, tmp_path: Path, own_name: bool, names: list[str]
) -> None:
    assert world.run(save_apart, str(tmp_path), own_name, size=2) == [[False, "all", *names]] * 2


@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from([(1, 6), (2, 3), (3, 2), (6, 1)]),
    tensors=st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 4), st.sampled_from(LAYOUTS)), min_size=1, max_size=9
    ),
    plain=st.integers(0, 9),
)
def test_every_part_is_written_once_and_the_index_has_it(
    shape: tuple[int, int], tensors: list[Any], plain: int
) -> None:
    size = shape[0] * shape[1]

    def state_here() -> dict[str, Any]:
        mesh = mesh_of(shape)
        state: dict[str, Any] = {f"plain {number}": torch.zeros(number) for number in range(plain)}
        for number, (rows, columns, layout) in enumerate(tensors):
            state[f"parts {number}"] = laid_out(torch.zeros(rows, columns), mesh, layout)
        return state

    layouts = []
    for rank in range(size):
        with fake_world(rank, size):
            state = state_here()
            layouts.append(layout_of(state, {}, meshes_of(state)))
    written: list[WrittenShard] = []
    counts = Counter[int]()
    for rank in reversed(range(size)):  # the main process's last, for the index
        with fake_world(rank, size):
            state = state_here()
            copies = common_replicas(layouts, rank)
            assert copies is not None
            for item in local_write_items(
                state, dict(zip(meshes_of(state), copies, strict=True)), rank, size
            ):
                assert item.tensor_data is not None
                chunk = item.tensor_data.chunk
                begin, part = tuple(chunk.offsets), tuple(chunk.sizes)
                written.append(WrittenShard(item.index.fqn, begin, part, f"__{rank}_0.distcp", 0, 1))
                counts[rank] += item.index.fqn.startswith("plain")
    assert max(counts.values(), default=0) <= max(-(-plain // size), 2)
    full = [part for part in written if 0 not in part.shape]  # type: ignore[operator]
    assert len({part[:2] for part in full}) == len(full)
    with fake_world(0, size), tempfile.TemporaryDirectory() as folder:
        by_file = groupby(written, key=lambda part: part.file)
        write_index(Path(folder), state, {}, [pickle.dumps([*parts]) for _, parts in by_file])
        index = FileSystemReader(folder).read_metadata()
    assert {(place.fqn, place.offset) for place in index.storage_data} >= {part[:2] for part in full}
    elements = {
        name: sum(chunk.sizes.numel() for chunk in entry.chunks)
        for name, entry in index.state_dict_metadata.items()
    }
    assert elements == {name: value.numel() for name, value in state.items()}


def test_the_largest_tensors_go_to_different_copies() -> None:
    sizes = {"a": 8, "b": 5, "c": 4, "d": 1, "e": 0, "f": 0}
    assert dcp_plan.choose_writers(sizes, 2) == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 0, "f": 1}
    assert dcp_plan.choose_writers(sizes, 9) == {name: number for number, name in enumerate("abcdef")}


def fail_alone(folder: str) -> str:
    """Save names of which two of the first process become one."""
    process = current_process()
    name = "c" if process.rank else "a.b"
    with closing(Writer()) as writer, pytest.raises((ValueError, CheckpointError)) as raised:
        write_folder({"a": {"b": 1}, name: 2}, Path(folder), process, writer=writer)
    return str(raised.value)


def test_a_process_that_cannot_name_its_tensors_lets_none_wait(world: Any, tmp_path: Path) -> None:
    first, second = world.run(fail_alone, str(tmp_path), size=2, timeout_s=60)
    assert "duplicate" in first
    assert "process 0: ValueError" in second
