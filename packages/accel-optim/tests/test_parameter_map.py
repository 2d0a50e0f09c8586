"""What trains in the place of a parameter, and which tensors belong to no model."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.parameter_map import ParameterMap
from accel_state.gradient import GradientState


def parameter(size: int = 2) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(size))


def test_a_parameter_that_was_replaced_twice_leads_to_the_last_one() -> None:
    first, second, third = parameter(), parameter(), parameter()
    parameters = ParameterMap()
    parameters.record(first, second)
    parameters.record(second, third)
    parameters.record(third, third)  # replaced by itself: nothing to follow

    assert all(parameters.trained(item) is third for item in (first, second, third))
    other = parameter()
    assert parameters.trained(other) is other
    assert parameters.trained_group([first, other, second]) == [third, other]


def test_gathered_tensors_are_found_when_they_are_asked_for() -> None:
    full, shard = parameter(4), parameter(2)
    calls: list[None] = []

    def gathered() -> list[tuple[torch.Tensor, torch.Tensor]]:
        calls.append(None)
        return [(full, shard)]

    parameters = ParameterMap(gathered=gathered)
    assert parameters.trained(full) is shard
    assert parameters.trained(full) is shard
    assert len(calls) == 1


def test_tensors_of_no_model_are_standalone_until_a_model_has_them() -> None:
    model, temperature, late = torch.nn.Linear(2, 1), parameter(1), torch.nn.Linear(1, 1)
    frozen = parameter(1).requires_grad_(False)
    sent: list[torch.Tensor] = []
    parameters = ParameterMap(sent.extend)
    tensors = [*model.parameters(), temperature, frozen, *late.parameters()]
    parameters.register(tensors)  # no model yet: nothing to tell apart
    assert parameters.standalone() == sent == []

    parameters.add_model(model)
    parameters.register(tensors)
    assert sent == [temperature, frozen, late.weight, late.bias]
    assert parameters.standalone() == [temperature, late.weight, late.bias]

    parameters.add_model(late)
    parameters.register(tensors)
    assert parameters.standalone() == [temperature]
    assert len(sent) == 4
    assert [parameters.in_model(item) for item in (model.weight, late.bias, temperature)] == [
        True,
        True,
        False,
    ]


def test_what_a_wrapper_had_is_standalone_once_the_wrapper_is_gone() -> None:
    core, head = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
    sent: list[torch.Tensor] = []
    parameters = ParameterMap(sent.extend)
    wrapper = torch.nn.Sequential(core)
    parameters.add_model(wrapper, in_place=False)
    parameters.add_model(head)
    parameters.register([*core.parameters(), *head.parameters()])
    assert sent == []
    del wrapper
    gc.collect()
    parameters.register([*core.parameters(), *head.parameters()])
    assert parameters.standalone() == sent == [core.weight, core.bias]


def test_it_keeps_nothing_alive_and_a_copy_is_empty() -> None:
    model, old = torch.nn.Linear(2, 1), parameter()
    parameters = ParameterMap()
    parameters.add_model(model)
    parameters.record(old, model.weight)
    assert copy.deepcopy(parameters).trained(old) is old
    alive = weakref.ref(model)
    del model, old
    gc.collect()
    assert alive() is None


class Engine:
    """A GradientSync that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.parameters = ParameterMap(reshard=lambda: self.calls.append("reshard"))

    def reduce_accumulated(self) -> None:
        self.calls.append("reduce")

    def drop_gradients(self, parameters: object = None) -> bool:
        self.calls.append("drop")
        return False


@pytest.mark.usefixtures("fresh_state")
def test_an_optimizer_steps_what_trains_and_reduces_first() -> None:
    engine, old, new, first = Engine(), parameter(), parameter(), parameter()
    engine.parameters.record(old, new)
    state = GradientState()
    optimizer = AcceleratedOptimizer(
        torch.optim.SGD([first], lr=1.0), gradient_state=state, gradient_sync=engine
    )
    optimizer.add_param_group({"params": old, "lr": 0.5})
    assert optimizer.param_groups[1]["params"] == [new]
    new.grad = torch.ones(2)
    optimizer.step()
    optimizer.zero_grad()
    assert engine.calls == ["reduce", "reshard", "drop"]
    assert new.tolist() == [0.5, 0.5]
    assert new.grad is None


class ScheduleFree(torch.optim.SGD):
    """Swaps weights, as schedule-free optimizers do."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


@pytest.mark.usefixtures("fresh_state")
def test_swapping_weights_reshards_and_reduces_nothing() -> None:
    engine = Engine()
    optimizer = AcceleratedOptimizer(ScheduleFree([parameter()], lr=1.0), gradient_sync=engine)
    optimizer.eval()
    optimizer.train()
    assert engine.calls == ["reshard", "reshard"]


@pytest.mark.usefixtures("fresh_state")
def test_a_group_that_is_added_stays_as_it_was() -> None:
    for engine in (None, Engine()):
        optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter()], lr=1.0), gradient_sync=engine)
        group = {"params": [parameter()]}
        optimizer.add_param_group(group)
        assert list(group) == ["params"]
