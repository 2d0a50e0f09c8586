from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, init_device_mesh

from accel_ops.torch_compat import shard_replicated

PLACEMENTS = [Shard(0), Shard(1), Replicate()]


def parts() -> list[torch.Tensor]:
    """The parts of tensors that differ between processes, which tells whose they are."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6).view(3, 2) + 100 * dist.get_rank()
    found = [shard_replicated(whole, mesh, [placement]) for placement in PLACEMENTS]
    assert all(part.shape == whole.shape for part in found)
    return [part.to_local() for part in found]


def test_each_process_cuts_its_part_of_its_own_tensor(world):
    first, second = world.run(parts)
    whole = torch.arange(6).view(3, 2)
    for found, expected in zip(first, [whole[:2], whole[:, :1], whole], strict=True):
        torch.testing.assert_close(found, expected)
    for found, expected in zip(second, [whole[2:], whole[:, 1:], whole], strict=True):
        torch.testing.assert_close(found, expected + 100)


def nested() -> tuple[torch.Tensor, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    whole = torch.arange(8.0, requires_grad=True)
    part = shard_replicated(whole, mesh, [Replicate(), Shard(0)])
    return part.to_local().detach(), part.requires_grad and part.is_leaf


def test_parts_lie_on_each_axis_of_a_mesh(world):
    found = world.run(nested, size=4)
    assert [part.tolist() for part, _ in found] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    assert all(is_leaf for _, is_leaf in found)
