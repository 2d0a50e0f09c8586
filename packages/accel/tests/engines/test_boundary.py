"""Whatever happens to the loop, everything that follows the accumulation window follows it together."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accel import Accelerator
from accel_state.handlers import GradientAccumulationPlugin

pytestmark = pytest.mark.usefixtures("fresh_state")

EVENTS = ("train", "break", "fail", "evaluate", "nested", "other")


class Loop:
    """A training loop to which things happen, next to what a reader expects of it."""

    def __init__(self, num_steps: int, length: int) -> None:
        plugin = GradientAccumulationPlugin(num_steps=num_steps, step_scheduler_per_process=False)
        self.accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        models = [torch.nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2)]
        for model in models:
            torch.nn.init.zeros_(model.weight)
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=1.0)
        size = self.accelerator.num_processes
        train, other = (DataLoader(torch.ones(length * size, 1, dtype=torch.float64)) for _ in range(2))
        prepared = self.accelerator.prepare(*models, *optimizers, scheduler, train, other)
        self.models, self.optimizers = prepared[:2], prepared[2:4]
        self.scheduler, self.train, self.other = prepared[4:]
        self.steps = num_steps
        self.in_window, self.moved, self.gathered, self.stepped = 0, 0, 0.0, 0.0  # what is expected

    def micro_batch(self, event: str, batch: torch.Tensor, is_last: bool) -> None:
        accelerator, models = self.accelerator, self.models
        closes = self.in_window + 1 == self.steps or is_last
        with contextlib.ExitStack() as stack:
            if event == "nested":
                stack.enter_context(accelerator.accumulate(models[0]))
                stack.enter_context(accelerator.accumulate(models[1]))
            else:
                stack.enter_context(accelerator.accumulate(*models))
            assert accelerator.sync_gradients is closes
            for model in models:
                if isinstance(model, DistributedDataParallel):
                    assert model.require_backward_grad_sync is closes
            if event == "fail":
                raise MemoryError
            for model in models:
                accelerator.backward(model(batch).sum())
            for optimizer in self.optimizers:
                optimizer.step()
            self.scheduler.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self.gathered += 1 / self.steps
        self.in_window += 1
        if closes:
            self.moved, self.in_window = self.moved + 1, 0
            self.stepped, self.gathered = self.stepped + self.gathered, 0.0

    def check(self) -> None:
        """The window, the weights, the schedule, the gradients and DDP all say the same."""
        assert self.accelerator.step == self.in_window
        assert self.scheduler.scheduler.last_epoch == self.moved
        for model in self.models:
            weight = self.accelerator.unwrap_model(model).weight
            assert weight.item() == pytest.approx(-self.stepped, rel=1e-12)
            assert (weight.grad is None) == (self.gathered == 0.0)
            if isinstance(model, DistributedDataParallel):
                assert model.require_backward_grad_sync

    def run(self, epochs: list[list[str]]) -> None:
        for events in epochs:
            for number, batch in enumerate(self.train):
                event = events[number % len(events)]
                before = (self.accelerator.sync_gradients, self.accelerator.step)
                if event == "evaluate":
                    with torch.no_grad():
                        for other in self.other:
                            self.models[0](other)
                elif event == "other":
                    for other in self.other:  # left early
                        self.models[0](other)
                        break
                assert (self.accelerator.sync_gradients, self.accelerator.step) == before
                with contextlib.suppress(MemoryError):
                    self.micro_batch(event, batch, self.train.end_of_dataloader)
                if event == "fail":
                    assert (self.accelerator.sync_gradients, self.accelerator.step) == before
                self.check()
                if event == "break":
                    break
            assert self.accelerator.gradient_state.active_dataloader is None


def happen(num_steps: int, length: int, epochs: list[list[str]]) -> None:
    Loop(num_steps, length).run(epochs)


HAPPENINGS = st.lists(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=6), min_size=1, max_size=3)
QUIET: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=40, **QUIET)
@given(st.integers(1, 4), st.integers(1, 7), HAPPENINGS)
def test_all_follow_one_window(num_steps: int, length: int, epochs: list[list[str]]) -> None:
    happen(num_steps, length, epochs)


@settings(max_examples=10, **QUIET)
@given(st.integers(1, 4), st.integers(1, 7), HAPPENINGS)
def test_all_follow_one_window_on_each_process(
    world: Any, num_steps: int, length: int, epochs: list[list[str]]
) -> None:
    world.run(happen, num_steps, length, epochs)


def two_loaders(accelerator: Accelerator) -> list[bool]:
    """Two loaders of unequal length in one loop, as `zip` reads them."""
    first, second = (DataLoader(torch.ones(length, 1)) for length in (6, 5))
    first, second = accelerator.prepare(first, second)
    seen = []
    for _ in zip(first, second, strict=False):
        with accelerator.accumulate():
            seen.append(accelerator.sync_gradients)
    return seen


def test_the_last_of_two_loaders_ends_a_window_and_is_named_once() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)

    with pytest.warns(UserWarning, match=r"follows the DataLoaderShard over Tensor \(length 5\)"):
        assert two_loaders(accelerator) == [False, False, True, False, True]
    assert two_loaders(accelerator) == [False, False, True, False, True]
