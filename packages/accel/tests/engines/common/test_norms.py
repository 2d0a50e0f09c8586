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

from accel.engines.common.norms import total_norm

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


@pytest.mark.usefixtures("_four_processes")
def test_meshes_of_the_same_processes_need_one_reduction_together() -> None:
    meshes = [init_device_mesh("cpu", (4, 1)), init_device_mesh("cpu", (1, 4)), init_device_mesh("cpu", (4,))]
    layouts = [[Shard(0), Shard(1)], [Shard(0), Shard(1)], [Shard(0)]]
    gradients = [
        DTensor.from_local(torch.ones(2, 2), *layout) for layout in zip(meshes, layouts, strict=True)
    ]

    with CommDebugMode() as found:
        total_norm(gradients, 2.0, torch.device("cpu"))

    assert found.get_total_counts() == 1


@pytest.mark.parametrize("norm_type", [0.5, 1, 2, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_the_norm_of_all_elements(norm_type: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(40, 30, generator=generator).to(dtype)
    parts = [whole[:7].contiguous(), whole[7:7], whole[7:, :9], whole[7:, 9:].t()]

    norm = total_norm(parts, norm_type, torch.device("cpu"))

    expected = torch.linalg.vector_norm(whole.double(), norm_type)
    assert float(norm) == pytest.approx(float(expected), rel=1e-2 if dtype is torch.bfloat16 else 1e-5)
    assert norm.dtype == torch.promote_types(dtype, torch.float32)


def test_no_gradients_have_the_norm_zero() -> None:
    assert float(total_norm([], 2.0, torch.device("cpu"))) == 0.0
    assert float(total_norm([torch.empty(0)], 2.0, torch.device("cpu"))) == 0.0


def test_what_is_not_finite_stays_so() -> None:
    assert float(total_norm([torch.tensor([1.0, float("inf")])], 2.0, torch.device("cpu"))) == float("inf")
    assert total_norm([torch.tensor([1.0, float("nan")])], 2.0, torch.device("cpu")).isnan()
