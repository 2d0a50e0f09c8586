"""Optimizers that are pointed to the parameters a model has after sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accel.engines.common.swap_parameters import swap_parameters
from accel_optim.parameter_map import ParameterMap


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape))


def replacements() -> tuple[torch.nn.Parameter, torch.nn.Parameter, ParameterMap]:
    """A parameter of (4, 2) that fp8 replaced, and then sharding; and what it is now."""
    old, between = parameter(4, 2), parameter(4, 2)
    whole = torch.arange(8.0).reshape(4, 2)
    new = torch.nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)]))
    parameter_map = ParameterMap()
    parameter_map.record(old, between)
    parameter_map.record(between, new)
    return old, new, parameter_map


def check_states() -> None:
    old, new, parameter_map = replacements()
    optimizer = torch.optim.SGD([{"params": [parameter(2)]}, {"params": [old], "lr": 0.5}], lr=0.1)
    states = {"average": torch.ones(4, 2), "rows": torch.ones(4), "step": torch.tensor(3.0)}
    optimizer.state[old] = dict(states)
    swap_parameters(optimizer, parameter_map.trained)

    assert optimizer.param_groups[1]["params"][0] is new
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert list(optimizer.state) == [new]
    present = optimizer.state[new]
    assert present["average"].to_local().shape == (2, 2)
    # What has another shape than the parameter, as factored moments do, is no part of it.
    assert not isinstance(present["rows"], DTensor)
    assert torch.equal(present["rows"], states["rows"])
    assert present["step"] == 3


def check_mixed_group(options: dict[str, Any]) -> None:
    old, _, parameter_map = replacements()
    optimizer = torch.optim.AdamW([old, parameter(2)], **options)
    swap_parameters(optimizer, parameter_map.trained)
    for item in optimizer.param_groups[0]["params"]:
        item.grad = torch.ones_like(item)
    optimizer.step()


def test_states_follow_through_several_replacements(world):
    world.run(check_states)


@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=str)
def test_full_parameters_next_to_sharded_ones_are_stepped_one_by_one(world, options):
    world.run(check_mixed_group, options)


def check_fused() -> None:
    with pytest.raises(ValueError, match=r"AdamW\(fused=True\): a parameter group has sharded and unsharded"):
        check_mixed_group({"fused": True})


def test_a_fused_step_of_both_is_rejected(world):
    world.run(check_fused)
