"""Whether processes have a state in one layout, and which copies they have then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_ckpt.sharded.layouts import Copy, Layout, common_copies, layout_of, ranks_of

pytestmark = pytest.mark.core


@contextmanager
def process_of(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Planned(torch.Tensor):
    """As torchrec's tables, which say by themselves what of them is written."""

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        return []


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # torch 2.6
def test_layouts_are_told_apart() -> None:
    found: list[Layout | None] = []
    with process_of(0, 4):
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
            found += [layout_of({"x": value}, {}), layout_of({"y": value}, {})]
            found += [layout_of({"x": value}, {"x": 1})]
        assert len(set(found)) == len(found)
        assert layout_of({"x": 1, "y": 2}, {}) == layout_of({"y": 3, "x": 4}, {})
        sums = DTensor.from_local(whole, mesh, (Replicate(), Partial()), run_check=False)
        planned = DTensor.from_local(whole.as_subclass(Planned), flat, (Shard(0),), run_check=False)
        for value in (sums, planned, whole.as_subclass(Planned)):
            assert layout_of({"x": value}, {}) is None
        half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        other = DeviceMesh("cpu", torch.tensor([2, 3]), _init_backend=False)
        part = distribute_tensor(whole, half, (Shard(0),))
        assert layout_of({"x": part}, {}) is not None
        elsewhere = DTensor.from_local(torch.zeros(2, 4), other, (Shard(0),), run_check=False)
        assert layout_of({"x": elsewhere}, {}) is None


def layout_on(*meshes: tuple[bytes, int]) -> Layout:
    return Layout("alike", meshes)


def test_meshes_that_every_process_is_in_one_of_are_copies() -> None:
    left, right = (b"0 1", 2), (b"2 3", 2)
    whole = (b"0 1 2 3", 4)
    layouts = [layout_on(whole, left)] * 2 + [layout_on(whole, right)] * 2

    assert common_copies(layouts, 0) == {whole[0]: Copy(0, 1), left[0]: Copy(0, 2)}
    assert common_copies(layouts, 3) == {whole[0]: Copy(0, 1), right[0]: Copy(1, 2)}


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
    assert [common_copies(layouts, rank) for rank in range(len(layouts))] == [None] * len(layouts)


def test_meshes_are_told_apart_by_ranks_and_shape() -> None:
    with process_of(0, 4):
        meshes = [init_device_mesh("cpu", shape) for shape in ((4,), (2, 2), (1, 4))]
        meshes.append(DeviceMesh("cpu", [3, 2, 1, 0], _init_backend=False))
        assert len({ranks_of(mesh) for mesh in meshes}) == 4
        assert ranks_of(meshes[0]) == ranks_of(init_device_mesh("cpu", (4,)))
