from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from accel_ops.collectives import waits
from accel_state.process.state import current_process

pytestmark = pytest.mark.core


def gather_while(seconds: float) -> tuple[list[float], bool, float]:
    """Gather ranks, where process 1 comes later; return them, whether `meanwhile` saw them, and its time."""
    rank = current_process().rank
    output, own = torch.full((2,), -1.0), torch.tensor([float(rank)])
    time.sleep(seconds * rank)
    began = time.perf_counter()
    came, passed = waits.all_gather(output, own, lambda: (output[1].item() == 1, time.perf_counter() - began))
    return output.tolist(), came, passed


def test_meanwhile_is_called_while_others_are_awaited(world: Any) -> None:
    (first, came, passed), (second, *_) = world.run(gather_while, 0.5, size=2)

    assert first == second == [0.0, 1.0]
    assert not came
    assert passed < 0.25


def gather_apart() -> list[float]:
    output = torch.empty(2)
    waits.wait(waits.start_all_gather(output, torch.tensor([current_process().rank + 1.0])))
    return output.tolist()


def test_what_was_started_is_awaited(world: Any) -> None:
    assert world.run(gather_apart, size=2) == [[1.0, 2.0]] * 2
