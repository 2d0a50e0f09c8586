"""What the norm of gradients on several meshes costs; that it is the true one is tested with the engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel.parallel.norms import total_norm

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.fixture
def _four_processes() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())  # collectives move no data
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_four_processes")
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_norm_costs_one_reduction_for_each_group(norm_type: float) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    layouts = [
        (mesh, [Shard(0), Shard(1)]),
        (mesh, [Shard(0), Replicate()]),
        (mesh, [Replicate(), Replicate()]),
        (mesh["dp_shard"], [Shard(0)]),
        (mesh["tp"], [Shard(1)]),
    ]
    gradients = [DTensor.from_local(torch.ones(2, 2), *layout) for layout in layouts * 3]

    with CommDebugMode() as found:
        norm = total_norm([*gradients, torch.ones(4)], norm_type, torch.device("cpu"))

    assert found.get_total_counts() == 2
    assert float(norm) == (8.0 if norm_type == 2.0 else 1.0)  # of 64 ones that this process has
