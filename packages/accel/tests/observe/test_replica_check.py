"""What is equal on all processes stays equal, or an error names the parameter that does not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.local_sgd import LocalSGD
from accel_optim.handlers import DistributedDataParallelKwargs
from accel_state.parallelism.config import ParallelismConfig

FSDP = FullyShardedDataParallelPlugin
ENGINES = {
    "single": dict,
    "ddp": dict,
    "fsdp1": lambda: {"fsdp_plugin": FSDP(fsdp_version=1, use_orig_params=True)},
    "fsdp2": lambda: {"fsdp_plugin": FSDP(fsdp_version=2)},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
}
SEVERAL = [name for name in ENGINES if name != "single"]


class Layers(torch.nn.Sequential):
    """Two layers that tensor parallelism can split."""

    _tp_plan: ClassVar = {"0": "colwise", "2": "rowwise"}

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def data(accelerator: Accelerator) -> torch.Tensor:
    """This process's shard of a batch."""
    rank, size = accelerator.engine.data_parallel.rank_and_size
    return torch.linspace(-2, 2, 24).view(6, 4).chunk(size)[rank]


def steps(
    accelerator: Accelerator, model: Any, optimizer: Any, *loose: torch.Tensor, unfreezes_after: int = 0
) -> Iterator[Any]:
    """Losses, each to be followed by its backward passes; then a step, and the norm."""
    for _ in range(4):
        loss = model(data(accelerator))
        yield (loss * loose[0] if loose else loss).square().mean()
        accelerator.norms.append(float(accelerator.clip_grad_norm_([*model.parameters(), *loose], 0.3)))
        optimizer.step()
        optimizer.zero_grad()
        if len(accelerator.norms) == unfreezes_after:
            accelerator.unwrap_model(model)[0].requires_grad_(True)


def two_backwards(engine: str) -> list[float]:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    accelerator.norms = []
    model = Layers()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for loss in steps(accelerator, model, optimizer):
        accelerator.backward(loss, retain_graph=True)
        accelerator.backward(loss * 0.5)
    return accelerator.norms


def unfreeze(engine: str) -> list[float]:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    accelerator.norms = []
    model = Layers()
    model[0].requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for loss in steps(accelerator, model, optimizer, unfreezes_after=2):
        accelerator.backward(loss)
    return accelerator.norms


def loose_tensor(engine: str) -> list[float]:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    accelerator.norms = []
    model = Layers()
    factor = torch.full((2,), 1.0 + accelerator.process_index, requires_grad=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD([*model.parameters(), factor], lr=0.5))
    for loss in steps(accelerator, model, optimizer, factor):
        accelerator.backward(loss)
    return [*accelerator.norms, *factor.tolist()]


def late_loose_tensor(engine: str) -> list[float]:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    accelerator.norms = []
    model = Layers()
    factor = torch.full((2,), 1.0 + accelerator.process_index, requires_grad=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer.add_param_group({"params": [factor]})
    for loss in steps(accelerator, model, optimizer, factor):
        accelerator.backward(loss)
    return [*accelerator.norms, *factor.tolist()]


def assert_as_one_process(world: Any, function: Any, engine: str) -> None:
    expected = world.run(function, "single", size=1)[0]
    first, second = world.run(function, engine)

    assert first == pytest.approx(expected, rel=1e-5)
    assert second == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize("engine", [name for name in SEVERAL if name != "fsdp1"])  # torch frees weights there
def test_two_backward_passes_of_one_forward_pass_count_equally_on_all(world, engine):
    assert_as_one_process(world, two_backwards, engine)


@pytest.mark.parametrize("engine", SEVERAL)
def test_what_is_unfrozen_after_prepare_is_averaged(world, engine):
    assert_as_one_process(world, unfreeze, engine)


@pytest.mark.parametrize("function", [loose_tensor, late_loose_tensor])
@pytest.mark.parametrize("engine", SEVERAL)
def test_a_tensor_of_no_model_is_averaged(world, engine, function):
    assert_as_one_process(world, function, engine)


def change_one(engine: str, name: str | None) -> list[str]:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    model = Layers()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    told = []
    for number in range(6):
        accelerator.backward(model(data(accelerator)).square().mean())
        if number == 3 and name is not None and accelerator.process_index == 1:
            with torch.no_grad():
                accelerator.unwrap_model(model).get_parameter(name).add_(1e-3)
        try:
            optimizer.step()
        except RuntimeError as error:
            told.append(f"{number}: {error}")
            break
        optimizer.zero_grad()
    return told


@pytest.mark.parametrize(
    ("environment", "at"),
    [({"ACCELERATE_CHECK_REPLICAS_STEPS": "2"}, 3), ({"ACCELERATE_DEBUG_MODE": "1"}, 3)],
    ids=["every second step", "debug mode"],
)
def test_a_parameter_that_differs_is_named_on_all(world, environment, at):
    for told in world.run(change_one, "ddp", "2.bias", env=environment):
        assert len(told) == 1
        assert told[0].startswith(f"{at}: Layers.2.bias differs between processes, before step {at + 1}")


def test_nobody_looks_unless_requested(world):
    assert world.run(change_one, "ddp", "2.bias") == [[], []]


@pytest.mark.parametrize("engine", SEVERAL)
def test_shards_are_not_taken_for_replicas(world, engine):
    assert world.run(change_one, engine, None, env={"ACCELERATE_CHECK_REPLICAS_STEPS": "1"}) == [[], []]


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2).requires_grad_(False)

    def forward(self, data: torch.Tensor, has_second: bool) -> torch.Tensor:
        return self.first(data) + (self.second(data) if has_second else 0)


def unfreeze_a_branch() -> list[float]:
    """A branch that is unfrozen later, and that the data of one process alone takes."""
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = Branches()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.unwrap_model(model).second.requires_grad_(True)
    norms = []
    for _ in range(2):
        accelerator.backward(model(data(accelerator), accelerator.process_index == 0).square().mean())
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_processes_may_take_other_branches_that_were_unfrozen(world):
    first, second = world.run(unfreeze_a_branch)

    assert first == second
    assert first[0] > 0


def keep_a_static_graph() -> str:
    handler = DistributedDataParallelKwargs(static_graph=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = accelerator.prepare(Layers())
    loss = model(data(accelerator)).square().mean()
    with pytest.raises(ValueError, match="retain_graph=True") as error:
        accelerator.backward(loss, retain_graph=True)
    return str(error.value)


def test_a_second_backward_pass_of_a_static_graph_is_rejected(world):
    for text in world.run(keep_a_static_graph):
        assert "Add the losses up, or leave static_graph out" in text


def part_for_a_while(way: str) -> bool:
    accelerator = Accelerator(cpu=True)
    model = Layers()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        accelerator.backward(model(data(accelerator)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    if way == "uneven":
        with accelerator.join_uneven_inputs([model]):
            for _ in range(2 + accelerator.process_index):
                step()
    else:
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
            for _ in range(4):
                step()
                local.step()
    return True


@pytest.mark.parametrize("way", ["uneven", "local SGD"])
@pytest.mark.parametrize(
    "environment", [{"ACCELERATE_CHECK_REPLICAS_STEPS": "1"}, {"ACCELERATE_DEBUG_MODE": "1"}], ids=str
)
def test_replicas_that_are_meant_to_differ_are_not_compared(world, way, environment):
    assert world.run(part_for_a_while, way, env=environment) == [True, True]


def step_in_turn() -> str:
    accelerator = Accelerator(cpu=True)
    models: list[Any] = [Layers(), Layers()]
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models[0], models[1], *optimizers = accelerator.prepare(*models, *optimizers)
    for number in range(4):
        for index, model in enumerate(models):
            accelerator.backward(model(data(accelerator)).square().mean())
            try:
                optimizers[index].step()
            except RuntimeError as error:
                return f"{number}, {index}: {error}"
            optimizers[index].zero_grad()
        if number == 0 and accelerator.process_index == 1:
            with torch.no_grad():
                accelerator.unwrap_model(models[0])[0].weight.add_(1e-3)
    return "nothing"


def test_each_of_several_optimizers_is_checked(world):
    for told in world.run(step_in_turn, env={"ACCELERATE_CHECK_REPLICAS_STEPS": "2"}):
        assert told.startswith("1, 0: Layers.0.weight differs between processes, before step 2")


def freed_at_once() -> bool:
    gc.collect()
    gc.disable()
    try:
        accelerator = Accelerator(cpu=True)
        model = Layers()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(data(accelerator)).square().mean())
        optimizer.step()
        alive = weakref.ref(accelerator.unwrap_model(model))
        del accelerator, model, optimizer
        return alive() is None
    finally:
        gc.enable()


def test_the_check_keeps_nothing_alive(world):
    assert world.run(freed_at_once, env={"ACCELERATE_CHECK_REPLICAS_STEPS": "1"}) == [True, True]
