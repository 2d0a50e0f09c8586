"""The state that an optimizer is given to be loaded into."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accel_ckpt.errors import CheckpointError
from accel_ckpt.sharded import optimizer as optimizer_state
from accel_state.process.state import PartialState, current_process

pytestmark = pytest.mark.core

OPTIONS: list[dict[str, Any]] = [
    {},
    {"amsgrad": True},
    {"foreach": True},
    {"fused": True},
    {"lr": torch.tensor(0.1)},
]


def described(value: Any) -> Any:
    """What loading depends on: everything but the numbers."""
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        return "parts", value.placements, value.device_mesh, described(value.to_local())
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type, value.requires_grad
    return value


def made_both_ways(name: str, options: dict[str, Any], sharded: bool) -> list[str]:
    """Return where the state that is made alone differs from the one of a step, and what else has changed."""
    PartialState(cpu=True)
    torch.manual_seed(0)
    # The last has one row: with two processes the second has no part of it.
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 1, dtype=torch.bfloat16))
    model[0].bias.requires_grad_(False)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (current_process().world_size,)))
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters()], "lr": 0.5}]
    optimizer = getattr(torch.optim, name)(groups, **{"lr": 0.1} | options)
    held = next(model[1].parameters())
    held.grad = torch.ones_like(held)
    before = [item.detach().clone() for item in model.parameters()]
    process = current_process()

    with mock.patch.object(optimizer_state, "_step_and_undo", side_effect=AssertionError):
        alone = optimizer_state._new_state(model, optimizer, process)
    with mock.patch.object(optimizer_state, "_MAKE_STATE_FIRST", ()):
        stepped = optimizer_state._new_state(model, optimizer, process)

    assert alone["state"].keys() == {"0.weight", "1.weight", "1.bias"}
    wrong = [key for key in stepped if described(alone[key]) != described(stepped[key])]
    same = all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    others = [item.grad for item in model.parameters() if item is not held]
    kept = not optimizer.state and bool((held.grad == 1).all()) and others == [None] * 3
    return [*wrong, *(alone.keys() ^ stepped.keys()), *(["more changed"] if not (same and kept) else [])]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_the_state_that_adam_makes_alone_is_that_of_a_step(
    world: Any, name: str, options: dict[str, Any]
) -> None:
    assert world.run(made_both_ways, name, options, True, size=2) == [[], []]


def fail_alone() -> tuple[str, int]:
    """Make a state that the second process cannot make; return the error, and how many entries are left."""
    PartialState(cpu=True)
    process = current_process()
    model = torch.nn.Linear(4, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    fails = mock.patch.object(torch.optim.AdamW, "_init_group", side_effect=OSError("no memory"))
    with fails if process.rank else nullcontext(), pytest.raises((OSError, CheckpointError)) as raised:
        optimizer_state._new_state(model, optimizer, process)
    return str(raised.value), len(optimizer.state)


def test_where_one_process_cannot_make_it_all_fail(world: Any) -> None:
    first, second = world.run(fail_alone, size=2, timeout_s=60)
    assert second == ("no memory", 0)
    assert "creating the state of an optimizer failed on another process. process 1: OSError" in first[0]
    assert first[1] == 0


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_also_of_full_parameters(name: str) -> None:
    assert made_both_ways(name, {"amsgrad": True}, False) == []
