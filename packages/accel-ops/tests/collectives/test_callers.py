"""Whether all processes call a function, or the main one alone."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from accel_ops.collectives.callers import who_calls
from accel_state.process.state import current_process

LONG_S = 100.0


def called() -> list[str]:
    process = current_process()
    found = []
    for count in range(4):
        if process.is_main:
            found.append(who_calls(process, 0.3 if count == 0 else LONG_S))
        dist.all_reduce(torch.ones(1))
    found.append(who_calls(process, LONG_S))
    return found


def test_one_process_is_all():
    assert who_calls(current_process(), LONG_S) == "all"


def test_the_main_process_waits_once_where_it_calls_alone(world):
    assert world.run(called) == [["main alone", "main", "main", "main", "all"], ["all"]]


def called_late() -> list[str]:
    process = current_process()
    time.sleep(0.0 if process.is_main else 2.0)
    found = []
    for patience_s in (0.3, LONG_S, LONG_S):
        found.append(who_calls(process, patience_s))
        dist.all_reduce(torch.ones(1))
    return found


def test_who_comes_late_is_waited_for_the_next_time(world):
    assert world.run(called_late) == [["main alone", "all", "all"], ["main before", "all", "all"]]
