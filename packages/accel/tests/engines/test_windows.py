"""Accumulation windows that are abandoned, restarted, or end without a backward pass, under every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_state.parallelism.config import ParallelismConfig

FSDP = FullyShardedDataParallelPlugin
ENGINES = {
    "single": dict,
    "ddp": dict,
    "fsdp1": lambda: {"fsdp_plugin": FSDP(fsdp_version=1)},
    "fsdp1, original": lambda: {"fsdp_plugin": FSDP(fsdp_version=1, use_orig_params=True)},
    "fsdp2": lambda: {"fsdp_plugin": FSDP(fsdp_version=2)},
    "fsdp2, gathered": lambda: {"fsdp_plugin": FSDP(fsdp_version=2, reshard_after_forward=False)},
    "hsdp": lambda: {"parallelism_config": ParallelismConfig(dp_shard_size=2)},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
}
STEPS = 2
pytestmark = pytest.mark.core


class Layers(torch.nn.Sequential):
    """Two layers that tensor parallelism can split."""

    _tp_plan: ClassVar = {"0": "colwise", "2": "rowwise"}

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def data(accelerator: Accelerator, number: int) -> torch.Tensor:
    """This process's shard of a batch."""
    whole = torch.linspace(-2, 2, 24).view(6, 4) * (1 + number / 3)
    rank, size = accelerator.engine.data_parallel.rank_and_size
    return whole.chunk(size)[rank]


def give_up(accelerator: Accelerator, model: Any, optimizer: Any, number: int, loss: Any) -> None:
    """The first window is given up at its last micro-batch; the one before had a loss that is not finite."""
    if number == 0:
        accelerator.backward(loss * float("nan"))
    elif number == 1:
        optimizer.zero_grad()
        return
    else:
        accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def zero_before_backward(
    accelerator: Accelerator, model: Any, optimizer: Any, number: int, loss: Any
) -> None:
    """As scripts without accumulation have it."""
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()


def end_without_backward(
    accelerator: Accelerator, model: Any, optimizer: Any, number: int, loss: Any
) -> None:
    """No process uses the loss of a window's last micro-batch."""
    if number % STEPS != STEPS - 1:
        accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def clear_the_model(accelerator: Accelerator, model: Any, optimizer: Any, number: int, loss: Any) -> None:
    """The model drops the first micro-batch of each window."""
    accelerator.backward(loss)
    if number % STEPS == 0:
        model.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def end_with_parameters_alone(
    accelerator: Accelerator, model: Any, optimizer: Any, number: int, loss: Any
) -> None:
    """The last micro-batch has a loss of the parameters, and not of the model."""
    if number % STEPS == STEPS - 1:
        inner = accelerator.unwrap_model(model)
        loss = sum(item.square().mean() for item in inner.parameters())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


LOOPS: dict[str, Callable[..., None]] = {
    "given up": give_up,
    "zero_grad before backward": zero_before_backward,
    "no last backward": end_without_backward,
    "model.zero_grad": clear_the_model,
    "a loss of parameters last": end_with_parameters_alone,
}


def run(engine: str, loop: str) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, **ENGINES[engine]())
    model = Layers()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for number in range(3 * STEPS):
        with accelerator.accumulate(model):
            loss = model(data(accelerator, number)).square().mean()
            seen.append(float(accelerator.reduce(loss.detach(), "mean")))
            LOOPS[loop](accelerator, model, optimizer, number, loss)
    weights = accelerator.get_state_dict(model)
    return [*seen, *(float(value.double().sum()) for value in weights.values())]


@pytest.mark.filterwarnings("ignore:zero_grad.. before step:UserWarning")
@pytest.mark.parametrize(
    ("engine", "loop"),
    # A loss of parameters is taken of full ones, which DDP alone has between forward passes.
    [
        (engine, loop)
        for engine in ENGINES
        for loop in LOOPS
        if engine != "single" and (engine == "ddp" or loop != "a loss of parameters last")
    ],
)
def test_a_window_trains_as_in_one_process(world, engine, loop):
    expected = world.run(run, "single", loop, size=1)[0]
    first, second = world.run(run, engine, loop)

    assert first == pytest.approx(expected, rel=1e-5)
    assert second[: 3 * STEPS] == first[: 3 * STEPS]


def leave_a_window(engine: str, way: str, folder: str) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, **ENGINES[engine]())
    model = Layers()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    if way == "load_state":
        accelerator.save_state(folder)
    with accelerator.accumulate(model):
        accelerator.backward(model(data(accelerator, 5)).square().sum())
    if way == "load_state":
        accelerator.load_state(folder)
    else:
        accelerator.free_memory()
        model, optimizer = accelerator.prepare(model, optimizer)
    norms = []
    for number in range(2 * STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(model(data(accelerator, number)).square().mean())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("way", ["free_memory", "load_state"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_window_that_is_left_leaks_into_no_other(world, tmp_path, engine, way):
    straight = world.run(leave_a_window, "single", "free_memory", str(tmp_path / "other"), size=1)[0]
    found = world.run(
        leave_a_window, engine, way, str(tmp_path / "saved"), size=1 if engine == "single" else 2
    )

    assert straight[0] < 3  # without the first window, whose loss is a sum
    for norms in found:
        assert norms == pytest.approx(straight, rel=1e-5)


def two_models(engine: str) -> list[float]:
    """One of two models has a backward pass in the first micro-batch of each window alone."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, **ENGINES[engine]())
    models: list[Any] = [Layers(), Layers()]
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models[0], models[1], *optimizers = accelerator.prepare(*models, *optimizers)
    norms = []
    for number in range(3 * STEPS):
        with accelerator.accumulate(*models):
            accelerator.backward(models[0](data(accelerator, number)).square().mean())
            if number % STEPS == 0:
                accelerator.backward(models[1](data(accelerator, number + 9)).square().mean())
            if accelerator.sync_gradients:
                norms += [float(accelerator.clip_grad_norm_(model.parameters(), 0.5)) for model in models]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "single"])
def test_a_window_may_end_with_another_model(world, engine):
    expected = world.run(two_models, "single", size=1)[0]

    for norms in world.run(two_models, engine):
        assert norms == pytest.approx(expected, rel=1e-5)


def held_by_hand(engine: str) -> list[float]:
    """Gradients are clipped, and dropped, inside of no_sync."""
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    model = Layers()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.no_sync(model):
        accelerator.backward(model(data(accelerator, 0)).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
        accelerator.backward(model(data(accelerator, 1)).square().mean())
        optimizer.zero_grad()
    accelerator.backward(model(data(accelerator, 2)).square().mean())
    return [float(accelerator.clip_grad_norm_(model.parameters(), 1e9))]


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "single"])
def test_what_is_dropped_inside_of_no_sync_stays_dropped(world, engine):
    expected = world.run(held_by_hand, "single", size=1)[0]

    for norms in world.run(held_by_hand, engine):
        assert norms == pytest.approx(expected, rel=1e-5)
