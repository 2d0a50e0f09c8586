from __future__ import annotations

import os

import torch

from accel_world.groups import num_gloo_threads


def train_in_shards() -> None:
    from accel import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert num_gloo_threads() > 0


def test_no_group_outlives_its_world(world):
    before = world.run(num_gloo_threads, size=2, init=False)  # libraries may have kept some
    world.run(train_in_shards, size=2)
    after = world.run(num_gloo_threads, size=2, init=False)

    assert all(now <= earlier for now, earlier in zip(after, before, strict=True))


KEPT = []


def keep_groups() -> int:
    import torch.distributed as dist

    KEPT.extend(dist.new_group() for _ in range(18))
    return os.getpid()


def own_id() -> int:
    return os.getpid()


def test_a_process_that_keeps_many_groups_is_replaced(world):
    first = world.run(keep_groups, size=2)

    assert not {*first} & {*world.run(own_id, size=2)}
