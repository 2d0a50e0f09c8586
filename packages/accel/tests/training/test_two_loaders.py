"""Which loader the accumulation window follows, where a loop reads several."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel_state.handlers import GradientAccumulationPlugin

pytestmark = pytest.mark.usefixtures("fresh_state")


class Loop:
    """Counts micro-batches of windows of three: '#' for one that steps, '.' for another."""

    def __init__(self, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, **options)
        self.seen = ""

    def loader(self, batches: int) -> Any:
        data = TensorDataset(torch.arange(float(batches)))
        return self.accelerator.prepare(DataLoader(data, batch_size=1))

    def micro_batch(self, **options: Any) -> None:
        with self.accelerator.accumulate(torch.nn.Identity(), **options):
            self.seen += "#" if self.accelerator.sync_gradients else "."


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def read_ahead(loader: Any, count: int) -> Iterator[Any]:
    batches = iter(loader)
    waiting = deque(islice(batches, count))
    for batch in batches:
        waiting.append(batch)
        yield waiting.popleft()
    yield from waiting


def validation_kept_open(loop: Loop, before: bool, every: int) -> None:
    train, validation = loop.loader(7), iter(loop.loader(3))
    for _ in range(2):
        for step, _ in enumerate(train):
            if before and step % every == 0:
                next(validation, None)
            loop.micro_batch()
            if not before and step % every == 0:
                next(validation, None)


def nested_evaluation(loop: Loop) -> None:
    train, validation = loop.loader(7), loop.loader(2)
    for _ in range(2):
        for step, _ in enumerate(train):
            loop.micro_batch()
            if step % 2:
                state = loop.accelerator.gradient_state
                assert [state.end_of_dataloader for _ in validation] == [False, True]
                assert state.active_dataloader is train


def inner_loop(loop: Loop, outer: int, inner: int) -> None:
    tasks, samples = loop.loader(outer), loop.loader(inner)
    for _ in tasks:
        for _ in samples:
            loop.micro_batch()


def phases(loop: Loop) -> None:
    """Each loader is the loop's own in one of them."""
    first, second = loop.loader(4), loop.loader(5)
    for train in (first, second, second):
        others = forever(second if train is first else first)
        for step, _ in enumerate(train):
            loop.micro_batch()
            if step % 2:
                next(others)


def in_parts(loop: Loop) -> None:
    for _ in loop.loader(4):
        loop.micro_batch()
        loop.micro_batch()


def by_hand(loop: Loop) -> None:
    train = loop.loader(4)
    batches = iter(train)
    for _ in range(8):
        if next(batches, None) is None:
            batches = iter(train)
            next(batches)
        loop.micro_batch()


LOOPS: dict[str, tuple[Callable[[Loop], None], str]] = {
    "validation is read after some steps": (lambda it: validation_kept_open(it, False, 3), "..#..##" * 2),
    "validation is read after each step": (lambda it: validation_kept_open(it, False, 1), "..#..##" * 2),
    "validation is read before some steps": (lambda it: validation_kept_open(it, True, 3), "..#..##" * 2),
    "validation is evaluated inside": (nested_evaluation, "..#..##" * 2),
    "an inner loop": (lambda it: inner_loop(it, 3, 4), "..##" * 3),
    "phases": (phases, "..##" + "..#.#" * 2),
    "several micro-batches of one batch": (in_parts, "..#..###"),
    "by hand": (by_hand, "..##" * 2),
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_window_ends_with_the_loader_of_the_loop(name: str) -> None:
    loop = Loop()
    run, expected = LOOPS[name]
    run(loop)
    assert loop.seen == expected


@pytest.mark.parametrize("loader", [None, 0, 1])
@pytest.mark.parametrize("lengths", [(7, 10), (10, 7), (7, 4)])
def test_where_two_loaders_give_a_batch_each_it_can_be_said_and_is_reported(
    lengths: tuple[int, int], loader: int | None
) -> None:
    loop = Loop()
    both = [loop.loader(length) for length in lengths]
    options = {} if loader is None else {"loader": both[loader]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            others = forever(both[1])
            for _ in islice(both[0], 10):
                next(others)
                loop.micro_batch(**options)
    followed = lengths[1 if loader is None else loader]
    one = ["#" if (step + 1) % followed == 0 else "." for step in range(lengths[0])]
    assert loop.seen == windows(one * 2)
    if loader is None:
        (warning,) = caught
        assert f"follows the DataLoaderShard over TensorDataset (length {followed})" in str(warning.message)
        assert f"and not the DataLoaderShard over TensorDataset (length {lengths[0]})" in str(warning.message)
    else:
        assert not caught


def windows(ends: list[str]) -> str:
    """The steps of windows of three that also close where the loader ends."""
    seen, count = "", 0
    for end in ends:
        count = 0 if end == "#" or count == 2 else count + 1
        seen += ".#"[count == 0]
    return seen


@pytest.mark.filterwarnings("ignore:Several loaders give a batch")
@pytest.mark.parametrize("length", range(1, 9))
def test_a_loader_that_starts_again_and_again_ends_no_window(length: int) -> None:
    loop = Loop()
    train, others = loop.loader(7), forever(loop.loader(length))
    for _ in range(6):
        for _ in train:
            loop.micro_batch()
            next(others)
    assert loop.seen == "..#..##" * 6


def test_loaders_that_end_together_are_no_question() -> None:
    loop = Loop()
    for _ in zip(loop.loader(7), loop.loader(7), strict=True):
        loop.micro_batch()
    assert loop.seen == "..#..##"


def test_nothing_is_reported_where_no_loader_ends_a_window() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    loaders = accelerator.prepare(DataLoader(range(3)), DataLoader(range(5)))
    seen = []
    for _ in zip(*loaders, strict=False):
        with accelerator.accumulate(torch.nn.Identity()):
            seen.append(accelerator.sync_gradients)
    assert seen == [False, True, False]


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_loader_that_is_read_ahead_leaves_no_window_open(ahead: int) -> None:
    loop = Loop()
    train = loop.loader(7)
    for _ in range(2):
        for _ in read_ahead(train, ahead):
            loop.micro_batch()
        assert loop.seen[-1] == "#"


def test_a_loader_that_is_read_ahead_can_say_its_end() -> None:
    class Ahead:
        end_of_dataloader = False

        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(read_ahead(train, 2), 1):
                self.end_of_dataloader = number == 7
                yield batch

    loop = Loop()
    train, ahead = loop.loader(7), Ahead()
    for _ in range(2):
        for _ in ahead:
            loop.micro_batch(loader=ahead)
    assert loop.seen == "..#..##" * 2


def test_a_loader_that_nobody_reads_is_rejected() -> None:
    loop = Loop()
    train, plain = loop.loader(4), DataLoader(range(4))
    rest = loop.accelerator.skip_first_batches(train, 1)
    for _ in rest:
        with pytest.raises(ValueError, match=r"length 4\), which is not being iterated"):
            loop.micro_batch(loader=train)
        with pytest.raises(TypeError, match=r"got a DataLoader\. Pass the loader that prepare\(\) returned"):
            loop.micro_batch(loader=plain)
        loop.micro_batch(loader=rest)
    assert loop.seen == "..#"


def rates(keeps_open: bool) -> tuple[list[float], torch.Tensor]:
    """Train with a schedule and a plateau schedule, and read validation now and then; return the rates."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    data = TensorDataset(torch.arange(7.0).reshape(7, 1) / 7)
    train, validation = (DataLoader(data, batch_size=1) for _ in range(2))
    model, optimizer, step, plateau, train, validation = accelerator.prepare(
        model, optimizer, step, plateau, train, validation
    )
    kept, found = iter(validation), []
    for _ in range(3):
        for number, (x,) in enumerate(train):
            if keeps_open and number % 2 == 0:
                next(kept, None)
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - 1).square().mean())
                optimizer.step()
                step.step()
                optimizer.zero_grad()
            if number == 4 and len(found) == 2:
                break  # inside a window
        plateau.step(1.0)
        found.append(optimizer.param_groups[0]["lr"])
    return found, model.weight.detach()


def test_an_iterator_that_is_kept_open_changes_no_step_and_no_rate() -> None:
    expected, weight = rates(False)
    found, other = rates(True)
    assert found == expected
    assert len(set(found)) == 3
    assert torch.equal(weight, other)
