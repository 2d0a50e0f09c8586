"""Waiting until every process calls a function."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accel_ops.collectives.store_barrier import store_barrier
from accel_state.process.state import current_process

LONG_S = 100.0


def test_one_process_waits_for_nobody():
    store_barrier(current_process(), "save", 0.0, lambda missing: pytest.fail(f"waits for {missing}"))


def called_late(late: int) -> list[list[int]]:
    process = current_process()
    told: list[list[int]] = []
    for count in range(3):
        if process.rank == late and not count:
            time.sleep(1.5)
        store_barrier(process, "save", 0.2 if not count else LONG_S, told.append)
        dist.all_reduce(torch.ones(1))
    return told


@pytest.mark.parametrize("late", [0, 1])
def test_who_comes_late_is_waited_for_and_named_once(world, late: int):
    assert world.run(called_late, late) == [[[1]] if late else [], []]


def called_by(rank: int) -> str | None:
    process = current_process()
    default: dist.Store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    default.set_timeout(timedelta(seconds=1.0))
    try:
        if process.rank == rank:
            with pytest.raises(RuntimeError) as error:
                store_barrier(process, "save", LONG_S, lambda missing: None)
            return str(error.value)
    finally:
        default.set_timeout(timedelta(seconds=300.0))
    return None


@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_come_for_as_long_as_a_collective_waits_is_named(world, rank: int):
    found = world.run(called_by, rank)

    assert found[1 - rank] is None
    assert f"process {rank} has waited for 1 s in save for process {1 - rank}. Call it" in found[rank]
