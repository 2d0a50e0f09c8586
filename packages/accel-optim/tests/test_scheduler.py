from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.scaler import get_grad_scaler
from accel_optim.scheduler import AcceleratedScheduler
from accel_optim.window import Window
from accel_state.gradient import GradientState
from accel_state.handlers import GradientAccumulationPlugin

pytestmark = pytest.mark.usefixtures("fresh_state")

SLOW_S = 100  # a worker's first optimizer or DDP imports torch's compiler, which takes seconds

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, factor=0.5, total_iters=3), lrs.ExponentialLR(o, gamma=0.9)]
    ),
    "ConstantLR": lambda o: lrs.ConstantLR(o, factor=0.5, total_iters=3),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, T_max=10),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=4),
    "CyclicLR": lambda o: lrs.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, gamma=0.9),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 1 / (step + 1)),
    "LinearLR": lambda o: lrs.LinearLR(o, total_iters=6),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, milestones=[2, 5]),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.95),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, max_lr=0.1, total_steps=12),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, total_iters=8, power=2.0),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, total_iters=3), lrs.ExponentialLR(o, gamma=0.9)], milestones=[3]
    ),
    "StepLR": lambda o: lrs.StepLR(o, step_size=2),
}


def test_every_scheduler_of_torch_is_in_the_list() -> None:
    there = {name for name in lrs.__all__ if inspect.isclass(getattr(lrs, name)) and name != "LRScheduler"}

    assert set(SCHEDULERS) == there


def parameter_and_optimizer(scaler: Any = None) -> tuple[nn.Parameter, AcceleratedOptimizer]:
    parameter = nn.Parameter(torch.ones(2))
    return parameter, AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0, momentum=0.9), scaler=scaler)


def metric(name: str, index: int) -> tuple[float, ...]:
    return (1.0 + index,) if name == "ReduceLROnPlateau" else ()


def rates(name: str, on_wrapper: bool | None, steps: int, processes: int = 1) -> list[list[float]]:
    """The learning rate after each step; `on_wrapper` None is plain torch."""
    parameter, optimizer = parameter_and_optimizer()
    inner = optimizer.optimizer
    scheduler = SCHEDULERS[name](optimizer if on_wrapper else inner)
    if on_wrapper is not None:
        scheduler = AcceleratedScheduler(scheduler, optimizer, num_processes=processes)
    seen = []
    for index in range(steps):
        parameter.grad = torch.ones(2)
        (inner if on_wrapper is None else optimizer).step()
        scheduler.step(*metric(name, index))
        seen.append([float(rate) for rate in scheduler.get_last_lr()])
    return seen


@pytest.mark.parametrize("on_wrapper", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_equals_the_plain_scheduler(name: str, on_wrapper: bool) -> None:
    assert rates(name, on_wrapper, 9) == rates(name, None, 9)


@pytest.mark.parametrize("name", sorted(set(SCHEDULERS) - {"ReduceLROnPlateau"}))
@pytest.mark.parametrize("processes", [2, 3])
def test_each_step_moves_the_schedule_num_processes_times(name: str, processes: int) -> None:
    alone = rates(name, None, 3 * processes)

    assert rates(name, False, 3, processes) == alone[processes - 1 :: processes]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_in_windows_it_moves_as_the_plain_scheduler_does_per_step(name: str) -> None:
    """Nine micro-batches in windows of two: four steps, and a tail that the loader's end closes."""
    state = GradientState.new(GradientAccumulationPlugin(num_steps=2))
    window, loader = Window(state), Loader()
    state._add_dataloader(loader)
    parameter, optimizer = parameter_and_optimizer()
    scheduler = AcceleratedScheduler(SCHEDULERS[name](optimizer), optimizer, num_processes=1)
    seen = []
    for index in range(9):
        loader.end_of_dataloader = index == 8
        with window:
            parameter.grad = torch.ones(2)
            optimizer.step()
            scheduler.step(*metric(name, (index - 1) // 2 if index < 8 else 4))
            optimizer.zero_grad()
            if state.sync_gradients:
                seen.append([float(rate) for rate in scheduler.get_last_lr()])

    assert seen == rates(name, None, 5)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_skipped_step_moves_no_schedule(name: str, processes: int) -> None:
    GradientState()._add_dataloader(loader := Loader())
    scaler = get_grad_scaler(device_type="cpu", init_scale=16.0)
    parameter, optimizer = parameter_and_optimizer(scaler)
    inner = SCHEDULERS[name](optimizer)
    scheduler = AcceleratedScheduler(inner, optimizer, num_processes=processes)
    for index in range(4):
        scaler.scale((parameter * (math.inf if index % 2 else 1.0)).sum()).backward()
        before = copy.deepcopy(scheduler.state_dict())
        optimizer.step()
        scheduler.step(*metric(name, index))
        optimizer.zero_grad()
        if index % 2:
            assert repr(scheduler.state_dict()) == repr(before)

    moves = 1 if name == "ReduceLROnPlateau" else processes
    assert [scheduler.get_last_lr()] == rates(name, None, 2 * moves)[-1:]
    assert loader is GradientState().active_dataloader


class Loader:
    end_of_dataloader = False
    remainder = -1


def test_a_metric_moves_a_plateau_schedule_once() -> None:
    loader = Loader()
    GradientState()._add_dataloader(loader)

    assert rates("ReduceLROnPlateau", False, 6, processes=4) == rates("ReduceLROnPlateau", None, 6)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_state_dict_continues(name: str) -> None:
    def make() -> tuple[nn.Parameter, AcceleratedOptimizer, AcceleratedScheduler]:
        parameter, optimizer = parameter_and_optimizer()
        return parameter, optimizer, AcceleratedScheduler(SCHEDULERS[name](optimizer), optimizer)

    parameter, optimizer, scheduler = make()
    for index in range(3):
        parameter.grad = torch.ones(2)
        optimizer.step()
        scheduler.step(*metric(name, index))
    other, second, again = make()
    again.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for part, step, schedule in ((parameter, optimizer, scheduler), (other, second, again)):
        part.grad = torch.ones(2)
        step.step()
        schedule.step(*metric(name, 3))

    assert again.get_last_lr() == scheduler.get_last_lr()
    assert second.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("adjust", [True, False])
def test_one_move_per_window(adjust: bool) -> None:
    state = GradientState.new(GradientAccumulationPlugin(num_steps=4, adjust_scheduler=adjust))
    window = Window(state)
    parameter, optimizer = parameter_and_optimizer()
    scheduler = AcceleratedScheduler(lrs.StepLR(optimizer, 1, gamma=0.5), optimizer, num_processes=1)
    seen = []
    for _ in range(8):
        with window:
            parameter.grad = torch.ones(2)
            optimizer.step()
            scheduler.step()
            seen.append(scheduler.get_last_lr()[0])

    assert seen == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25]
    assert scheduler.last_epoch == 2
    # torch counts the call that its constructor makes
    assert scheduler._step_count == (9 if adjust else 3)


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    scaler = get_grad_scaler(device_type="cpu", init_scale=16.0)
    parameter, optimizer = parameter_and_optimizer(scaler)
    scheduler = AcceleratedScheduler(
        lrs.StepLR(optimizer.optimizer, 1, gamma=0.5), optimizer, num_processes=3
    )
    seen = []
    for factor in (math.inf, 1.0, math.nan, 1.0):
        scaler.scale((parameter * factor).sum()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append(scheduler.get_last_lr()[0])

    assert seen == [1.0, 0.125, 0.125, 0.125**2]


def test_it_waits_for_all_its_optimizers() -> None:
    scaler = get_grad_scaler(device_type="cpu")
    first, a = parameter_and_optimizer(scaler)
    second, b = parameter_and_optimizer(scaler)
    scheduler = AcceleratedScheduler(lrs.StepLR(a.optimizer, 1, gamma=0.5), [a, b], num_processes=1)
    for factor, rate in ((math.inf, 1.0), (1.0, 0.5)):
        scaler.scale(first.sum() + (second * factor).sum()).backward()
        for optimizer in (a, b):
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        assert scheduler.get_last_lr() == [rate]


def test_a_plain_optimizer_is_taken_as_stepped() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = AcceleratedScheduler(lrs.StepLR(inner, 1, gamma=0.5), inner)
    inner.step()
    scheduler.step()

    assert scheduler.get_last_lr() == [0.5]


def test_step_with_optimizer_false_is_the_schedulers_own_step() -> None:
    state = GradientState()
    _, optimizer = parameter_and_optimizer()
    scheduler = AcceleratedScheduler(
        lrs.StepLR(optimizer, 1, gamma=0.5), optimizer, step_with_optimizer=False, num_processes=4
    )
    optimizer.step()
    state._set_sync_gradients(False)
    scheduler.step()

    assert scheduler.get_last_lr() == [0.5]


def test_split_batches_moves_once() -> None:
    _, optimizer = parameter_and_optimizer()
    scheduler = AcceleratedScheduler(
        lrs.StepLR(optimizer, 1, gamma=0.5), optimizer, split_batches=True, num_processes=4
    )
    optimizer.step()
    scheduler.step()

    assert scheduler.get_last_lr() == [0.5]


def test_one_setting_makes_it_one_move_per_step() -> None:
    state = GradientState.new(GradientAccumulationPlugin(num_steps=2, step_scheduler_per_process=False))
    window = Window(state)
    parameter, optimizer = parameter_and_optimizer()
    scheduler = AcceleratedScheduler(lrs.StepLR(optimizer, 1, gamma=0.5), optimizer, num_processes=4)
    for _ in range(6):
        with window:
            parameter.grad = torch.ones(2)
            optimizer.step()
            scheduler.step()

    assert scheduler.get_last_lr() == [0.125]


def sequence_with_a_short_part(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lrs.OneCycleLR(optimizer, 0.1, total_steps=2), lrs.LinearLR(optimizer, total_iters=9)]
    return lrs.SequentialLR(optimizer, parts, milestones=[5])


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: lrs.OneCycleLR(o, 0.1, total_steps=7),
        lambda o: lrs.SequentialLR(
            o, [lrs.LinearLR(o, total_iters=2), lrs.OneCycleLR(o, 0.1, total_steps=5)], milestones=[2]
        ),
        lambda o: lrs.ChainedScheduler([lrs.OneCycleLR(o, 0.1, total_steps=7), lrs.ConstantLR(o)]),
    ],
    ids=["alone", "in a sequence", "in a chain"],
)
def test_moves_beyond_the_end_of_a_schedule_are_left_out(make: Make, processes: int) -> None:
    _, optimizer = parameter_and_optimizer()
    plain = make(optimizer)
    for _ in range(7):
        optimizer.step()
        plain.step()
    _, optimizer = parameter_and_optimizer()
    scheduler = AcceleratedScheduler(make(optimizer), optimizer, num_processes=processes)
    for _ in range(-(-7 // processes)):  # the last of these steps has fewer moves
        optimizer.step()
        scheduler.step()

    assert scheduler.get_last_lr() == plain.get_last_lr()
    optimizer.step()
    with pytest.warns(UserWarning, match=rf"would advance it {processes} more time"):
        scheduler.step()
    for _ in range(3):  # told once
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == plain.get_last_lr()


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_a_part_that_ends_before_its_milestone_waits_for_it(processes: int) -> None:
    _, optimizer = parameter_and_optimizer()
    schedule = sequence_with_a_short_part(optimizer)
    scheduler = AcceleratedScheduler(schedule, optimizer, num_processes=processes)
    for _ in range(12 // processes):
        optimizer.step()
        scheduler.step()

    assert scheduler.last_epoch == 12
    # The second part began at the milestone, and has moved since.
    assert scheduler._schedulers[1].last_epoch == 7


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (
            lambda o: lrs.SequentialLR(
                o, [lrs.LinearLR(o, total_iters=2), lrs.OneCycleLR(o, 0.1, total_steps=5)], milestones=[2]
            ),
            7,
        ),
        (lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.OneCycleLR(o, 0.1, total_steps=7)]), 7),
        # a part that has come to its end does not hold up the parts after it
        (
            lambda o: lrs.SequentialLR(
                o, [lrs.OneCycleLR(o, 0.1, total_steps=2), lrs.LinearLR(o, total_iters=9)], milestones=[3]
            ),
            8,
        ),
    ],
    ids=["sequence that ends", "chain", "sequence that goes on"],
)
def test_extra_moves_stop_where_a_part_of_the_schedule_ends(make: Make, length: int) -> None:
    _, optimizer = parameter_and_optimizer()
    scheduler = AcceleratedScheduler(make(optimizer), optimizer, num_processes=2)
    moves, plain = [], scheduler.scheduler.step
    scheduler.scheduler.step = lambda: moves.append(plain())
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert len(moves) == length


def test_a_loop_that_is_left_in_a_window_leaves_the_schedule_where_it_is() -> None:
    window = Window(GradientState.new(GradientAccumulationPlugin(num_steps=4)))
    parameter, optimizer = parameter_and_optimizer()
    scheduler = AcceleratedScheduler(lrs.StepLR(optimizer, 1, gamma=0.5), optimizer)
    for _ in range(2):
        with window:
            parameter.grad = torch.ones(2)
            break
    optimizer.step()
    scheduler.step()  # after the loop, as schedules of epochs are
    assert scheduler.get_last_lr() == [1.0]

    for _ in range(3):  # the next epoch ends the window
        with window:
            optimizer.step()
            scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_a_measurement_after_the_epoch_counts_although_a_window_is_open() -> None:
    state = GradientState.new(GradientAccumulationPlugin(num_steps=4))
    _, optimizer = parameter_and_optimizer()
    scheduler = AcceleratedScheduler(lrs.ReduceLROnPlateau(optimizer, patience=0, factor=0.5), optimizer)
    state._set_sync_gradients(False)
    loader = Loader()
    state._add_dataloader(loader)
    scheduler.step(1.0)
    scheduler.step(2.0)
    assert scheduler.get_last_lr() == [1.0]

    state._remove_dataloader(loader)
    scheduler.step(1.0)
    scheduler.step(metrics=2.0)
    assert scheduler.get_last_lr() == [0.5]


def test_the_number_of_processes_is_the_worlds(world: Any) -> None:
    assert world.run(_moves, size=3, timeout_s=SLOW_S) == [3, 3, 3]


def _moves() -> int:
    _, optimizer = parameter_and_optimizer()
    scheduler = AcceleratedScheduler(lrs.StepLR(optimizer, 100), optimizer)
    optimizer.step()
    scheduler.step()
    return int(scheduler.last_epoch)


def test_print_lr(capsys: pytest.CaptureFixture[str]) -> None:
    _, optimizer = parameter_and_optimizer()
    AcceleratedScheduler(lrs.StepLR(optimizer, 1), optimizer).print_lr()
    assert capsys.readouterr().out == "Learning rate of group 0: 1.0000e+00.\n"

    own = SimpleNamespace(print_lr=lambda *args: print("own", *args))
    AcceleratedScheduler(own, optimizer).print_lr(True, 0, 0.5)
    assert capsys.readouterr().out == "own True 0 0.5\n"


def test_the_rest_is_the_schedulers() -> None:
    _, optimizer = parameter_and_optimizer()
    scheduler = AcceleratedScheduler(lrs.StepLR(optimizer, 1), optimizer)

    assert scheduler.base_lrs == [1.0]
    assert scheduler.optimizer is optimizer
    assert "StepLR" in repr(scheduler)
    with pytest.raises(AttributeError, match="'StepLR' object has no attribute 'missing'"):
        _ = scheduler.missing
    with pytest.warns(UserWarning, match="get_last_lr"):
        assert scheduler.get_lr() == [1.0]
    assert copy.deepcopy(scheduler).get_last_lr() == [1.0]
