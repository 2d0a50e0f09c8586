"""Processes that change the order of their modules after the first forward pass."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accel.engines.common.same_order import check_same_order
from accel_ops.debug.store import default_store
from accel_state.enums import DistributedType
from accel_state.process.info import ProcessInfo


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(6))

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        for number in order:
            x = self.layers[int(number)](x)
        return x


def run(passes: dict[int, list[str]], process: ProcessInfo) -> str:
    """The message of the error that the passes of this process raise; an empty one without an error."""
    store = default_store()
    assert store is not None
    store.set_timeout(timedelta(seconds=2))
    model = Layers()
    units = {f"layer {number}": layer for number, layer in enumerate(model.layers)}
    check_same_order(model, units, process, "an engine", "Fix it.")
    try:
        model(torch.ones(2), "012345").sum().backward()
        for order in passes[dist.get_rank()]:
            model(torch.ones(2), order)
    except RuntimeError as error:
        return str(error)
    return ""


def run_here(passes: dict[int, list[str]]) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    kind = DistributedType.MULTI_CPU
    return run(passes, ProcessInfo(rank, size, rank, size, torch.device("cpu"), "gloo", kind))


WRONG = {
    "at layer 2 and others at layer 3 .process": (["02345"], ["0345"]),
    "at layer 2 and others at the end": (["02345"], ["0"]),
    "processes come to layer 2 in different places": (["02345", "012345"], ["012345", "02345"]),
    "come to layer 2 in different places ": (["02345"], ["0122345"]),
}


@pytest.mark.filterwarnings("ignore:.* where the first one was not")
@pytest.mark.parametrize("message", WRONG)
def test_processes_that_change_it_differently_all_raise(world, message: str):
    passes = dict(enumerate(WRONG[message]))
    for error in world.run(run_here, passes, size=2, timeout_s=60):
        assert re.search(message, error)
        assert error.endswith("Fix it.")


@pytest.mark.filterwarnings("ignore:.* where the first one was not")
def test_a_process_that_changes_it_alone_raises(world):
    passes = {0: ["012345", "02345"], 1: ["012345", "012345"]}
    error, none = world.run(run_here, passes, size=2, timeout_s=60)
    assert "not all other processes came there within 2 s" in error
    assert none == ""


@pytest.mark.filterwarnings("ignore:.* where the first one was not")
def test_processes_that_change_it_alike_go_on(world):
    same = ["02345", "012345", "5", "", "543210", "0011234512", "012345"]
    assert world.run(run_here, {0: same, 1: same}, size=2, timeout_s=60) == ["", ""]
