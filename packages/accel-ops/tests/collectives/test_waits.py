from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_ops.collectives import waits
from accel_ops.debug.store import default_store
from accel_state.process.state import current_process

pytestmark = pytest.mark.core


def gather_while(name: str) -> list[float]:
    """Gather ranks, where process 1 comes once the other one is in `meanwhile`."""
    store: Any = default_store()
    rank = current_process().rank
    if rank == 1:
        store.get(name)  # waits for it
    output = torch.full((2,), -1.0)
    waits.all_gather(output, torch.tensor([float(rank)]), dist.group.WORLD, lambda: store.set(name, ""))
    return output.tolist()


def test_meanwhile_is_called_while_others_are_awaited(world: Any) -> None:
    assert world.run(gather_while, "test_waits", size=2, timeout_s=60) == [[0.0, 1.0]] * 2


def gather_apart(name: str) -> tuple[list[float], list[float]]:
    store: Any = default_store()
    rank = current_process().rank
    if rank == 1:
        store.get(name)
    output = torch.full((2,), -1.0)
    work = waits.start_all_gather(output, torch.tensor([float(rank)]), dist.group.WORLD)
    before = output.tolist()
    store.set(name, "")
    waits.wait(work)
    return before, output.tolist()


def test_what_was_started_is_awaited(world: Any) -> None:
    (before, after), (_, other) = world.run(gather_apart, "test_waits, apart", size=2, timeout_s=60)
    assert before[1] == -1.0
    assert after == other == [0.0, 1.0]
