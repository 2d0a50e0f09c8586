"""Whether processes have a state in one layout, and which copies they have then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from accel_ckpt.sharded.layouts import Layout, Replica, common_replicas, layout_of, meshes_of
from accel_world.fake import fake_world

pytestmark = pytest.mark.core


class Planned(torch.Tensor):
    """As torchrec's tables, which say by themselves what of them is written."""

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        return []


def layout(state: dict[str, Any], paths: dict[str, Any]) -> Layout | None:
    return layout_of(state, paths, meshes_of(state))


def test_layouts_are_distinguished() -> None:
    found: list[Layout | None] = []
    with fake_world(0, 4):
        mesh, flat = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
        whole = torch.zeros(4, 4)
        for value in (
            whole,
            torch.zeros(4),
            whole.double(),
            1.0,
            distribute_tensor(whole, mesh, (Replicate(), Shard(0))),
            distribute_tensor(whole, mesh, (Replicate(), Shard(1))),
            distribute_tensor(whole, flat, (Shard(0),)),
        ):
            found += [layout({"x": value}, {}), layout({"y": value}, {})]
            found += [layout({"x": value}, {"x": 1})]
        assert len(set(found)) == len(found)
        assert layout({"x": 1, "y": 2}, {}) == layout({"y": 3, "x": 4}, {})
        sums = DTensor.from_local(whole, mesh, (Replicate(), Partial()), run_check=False)
        planned = DTensor.from_local(whole.as_subclass(Planned), flat, (Shard(0),), run_check=False)
        for value in (sums, planned, whole.as_subclass(Planned)):
            assert layout({"x": value}, {}) is None
        half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        other = DeviceMesh("cpu", torch.tensor([2, 3]), _init_backend=False)
        part = distribute_tensor(whole, half, (Shard(0),))
        assert layout({"x": part}, {}) is not None
        elsewhere = DTensor.from_local(torch.zeros(2, 4), other, (Shard(0),), run_check=False)
        assert layout({"x": elsewhere}, {}) is None


def layout_on(*meshes: tuple[bytes, int]) -> Layout:
    return Layout("alike", meshes)


def test_meshes_that_every_process_is_in_one_of_are_copies() -> None:
    left, right = (b"0 1", 2), (b"2 3", 2)
    whole = (b"0 1 2 3", 4)
    layouts = [layout_on(whole, left)] * 2 + [layout_on(whole, right)] * 2

    assert common_replicas(layouts, 0) == [Replica(0, 1), Replica(0, 2)]
    assert common_replicas(layouts, 3) == [Replica(0, 1), Replica(1, 2)]


def test_meshes_that_overlap_are_no_copies_wherever_a_process_sees_one_of_them_twice() -> None:
    """Processes 0, 1, 6 and 7 have both tensors on one mesh, and the others have two meshes."""
    groups = {"a": [[0, 1], [2, 3], [4, 5], [6, 7]], "b": [[0, 1], [2, 4], [3, 5], [6, 7]]}
    layouts = []
    for rank in range(8):
        with fake_world(rank, 8):
            state = {}
            for name, meshes in groups.items():
                (ranks,) = (ranks for ranks in meshes if rank in ranks)
                mesh = DeviceMesh("cpu", ranks, _init_backend=False)
                state[name] = DTensor.from_local(torch.zeros(2), mesh, (Shard(0),), run_check=False)
            layouts.append(layout(state, {}))
    assert None not in layouts
    assert [common_replicas(layouts, rank) for rank in range(8)] == [None] * 8


@pytest.mark.parametrize(
    "others",
    [
        [None],
        [Layout("other", ((b"0 1", 2),))],
        [layout_on((b"1 0", 2))],  # the same ranks in another order
        [layout_on((b"1 2", 2)), layout_on((b"1 2", 2))],  # process 0 is alone on a mesh of two
    ],
)
def test_processes_that_do_not_agree_have_none(others: list[Layout | None]) -> None:
    layouts = [layout_on((b"0 1", 2)), *others]
    assert [common_replicas(layouts, rank) for rank in range(len(layouts))] == [None] * len(layouts)


def test_meshes_are_distinguished_by_ranks_and_shape() -> None:
    with fake_world(0, 4):
        meshes = [init_device_mesh("cpu", shape) for shape in ((4,), (2, 2), (1, 4), (4,))]
        meshes.append(DeviceMesh("cpu", [3, 2, 1, 0], _init_backend=False))
        found = layout_of({}, {}, meshes)
    assert found is not None
    assert len({ranks for ranks, _ in found.meshes}) == 4
    assert found.meshes[0] == found.meshes[3]
