"""Processes with fewer batches than others: a warning comes before the others hang."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel.accelerator import Accelerator
from accel_data.config import DataLoaderConfiguration

pytestmark = pytest.mark.usefixtures("fresh_state")


class Stream(IterableDataset):
    """A stream that every process reads."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(torch.ones(self.count, 1))


class Sized(Stream):
    """A stream of known length."""

    def __len__(self) -> int:
        return self.count


class Part(IterableDataset):
    """A stream of one process, which says so."""

    def __init__(self, count: int, rank: int, size: int) -> None:
        self.count = count
        self.rank, self.num_replicas = rank, size

    def __iter__(self):
        return iter(torch.ones(self.count, 1))


def read(kind: str, count: int, even: bool = False, drop_last: bool = False) -> tuple[list[str], int]:
    """Iterate a loader; return the warnings, and the number of its batches."""
    dispatch = False if kind in ("stream", "sized stream") else None
    config = DataLoaderConfiguration(even_batches=even, dispatch_batches=dispatch)
    accelerator = Accelerator(dataloader_config=config)
    data = {
        "map": torch.ones(count, 1),
        "sampler of batches": torch.ones(count, 1),
        "stream": Stream(count),
        "sized stream": Sized(count),
        "dispatched stream": Stream(count),
        "dispatched sized stream": Sized(count),
    }[kind]
    loader = DataLoader(data, batch_size=2, drop_last=drop_last)
    if kind == "sampler of batches":
        loader = DataLoader(data, batch_sampler=[[index] for index in range(count)])
    loader = accelerator.prepare(loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        number = len(list(loader))
    return [str(warning.message) for warning in caught], number


@pytest.mark.parametrize(
    ("kind", "count", "options", "message", "numbers"),
    [
        ("map", 8, {}, None, [2, 2]),
        ("map", 5, {}, "gives 2 batches to process 0, but only 1 to process 1", [2, 1]),
        ("map", 1, {}, "gives 1 batches to process 0, but only 0 to process 1", [1, 0]),
        ("map", 7, {}, None, [2, 2]),  # the last batch of process 1 is smaller
        ("map", 5, {"drop_last": True}, None, [1, 1]),
        ("map", 5, {"even": True}, None, [2, 2]),
        ("sampler of batches", 3, {}, "gives 2 batches to process 0, but only 1 to process 1", [2, 1]),
        ("stream", 5, {}, "may give some processes fewer batches than others", [2, 1]),
        ("stream", 5, {"even": True}, None, [2, 2]),
        ("map", 6, {}, None, [2, 2]),  # the two samples that are left are shared
        ("sized stream", 6, {}, None, [2, 2]),
        ("sized stream", 5, {}, "gives 2 batches to process 0, but only 1 to process 1", [2, 1]),
        ("dispatched sized stream", 6, {}, None, [2, 2]),
        ("dispatched sized stream", 5, {}, "gives 2 batches to process 0, but only 1 to process 1", [2, 1]),
        ("dispatched stream", 5, {}, "may give some processes fewer batches than others", [2, 1]),
    ],
)
def test_uneven_batches_are_reported_once(world, kind, count, options, message, numbers):
    results = world.run(read, kind, count, **options)

    assert [number for _, number in results] == numbers
    assert [len(told) for told, _ in results] == [message is not None, 0]
    assert message is None or message in results[0][0][0]


def test_one_process_has_nobody_to_wait_for():
    assert read("map", 5) == ([], 3)


def trained() -> tuple[int, float]:
    """Train on five samples, inside of the join that the warning names: no warning."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(torch.arange(5.0).view(5, 1), batch_size=2)
    )
    steps = 0
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps, next(model.parameters()).item()


def test_a_join_takes_them(world):
    (first, weight), (second, other) = world.run(trained)

    assert (first, second) == (2, 1)
    assert weight == other


def make(kind: str, count: int, batch_size: int) -> tuple[Accelerator, DataLoader]:
    dispatch = kind.startswith("dispatched")
    config = DataLoaderConfiguration(even_batches=False, dispatch_batches=dispatch)
    accelerator = Accelerator(dataloader_config=config)
    data = Numbers(count) if "stream" in kind else range(count)
    return accelerator, accelerator.prepare(DataLoader(data, batch_size))


class Numbers(Sized):
    def __iter__(self):
        return iter(range(self.count))


KINDS = ["map", "sized stream", "dispatched map", "dispatched sized stream"]


def gathered_in_the_loop(kind: str, count: int, batch_size: int) -> tuple[list[int], list[int]]:
    """Gather in every step, with what all processes must call."""
    accelerator, loader = make(kind, count, batch_size)
    seen, sizes = [], []
    for batch in loader:
        sizes.append(len(batch))
        seen += accelerator.gather_for_metrics(batch).tolist()
        accelerator.reduce(torch.ones(1))
    return seen, sizes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "batch_size", "size"), [(10, 4, 2), (27, 8, 3), (29, 8, 3), (34, 2, 2)])
def test_all_make_as_many_steps_where_a_sample_for_each_is_left(world, kind, count, batch_size, size):
    results = world.run(gathered_in_the_loop, kind, count, batch_size, size=size)
    full, left = divmod(count, batch_size * size)
    for rank, (seen, sizes) in enumerate(results):
        assert seen == list(range(count))
        assert sizes == [batch_size] * full + [left // size + (rank < left % size)]


def raises_in_the_last_step(kind: str, count: int, batch_size: int) -> tuple[list[str], int, str]:
    accelerator, loader = make(kind, count, batch_size)
    steps, error = 0, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            told = len(caught)  # before the first batch
            try:
                accelerator.gather_for_metrics(batch)
            except RuntimeError as raised:
                error = str(raised)
            steps += 1
    assert told == len(caught)
    return [str(warning.message) for warning in caught], steps, error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "batch_size", "size"), [(25, 8, 3), (33, 2, 2), (26, 8, 3)])
def test_gathering_without_the_others_raises_immediately(world, kind, count, batch_size, size):
    results = world.run(raises_in_the_last_step, kind, count, batch_size, size=size)
    full, left = divmod(count, batch_size * size)
    for rank, (told, steps, error) in enumerate(results):
        assert len(told) == (rank == 0)
        expected = f"gives {full + 1} batches to process 0, but only {full} to process {left}"
        assert all(expected in text for text in told)
        assert steps == full + (rank < left)
        assert bool(error) == (rank < left)
    name = "DataLoaderDispatcher" if "dispatched" in kind else "DataLoaderShard"
    data, (_, _, error) = "Numbers" if "stream" in kind else "range", results[0]
    assert f"{name} over {data} (batch_size={batch_size}, even_batches=False), only {left} of" in error
    assert "Use even_batches=True" in error


def make_parts(counts: tuple[int, ...]) -> tuple[Accelerator, DataLoader]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    return accelerator, accelerator.prepare(DataLoader(Part(counts[rank], rank, len(counts)), 2))


def gathers_parts(counts: tuple[int, ...], first: int = 1, epochs: int = 2) -> tuple[list[str], list[str]]:
    """Gather from the `first` step on, and return warnings and errors; slow where there is less data."""
    accelerator, loader = make_parts(counts)
    errors = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            got = 0
            for step, batch in enumerate(loader, 1):
                if first > 1 and counts[accelerator.process_index] == min(counts):
                    time.sleep(0.3)
                if step < first:
                    continue
                try:
                    got += len(accelerator.gather_for_metrics(batch))
                    accelerator.gather_for_metrics(["twice in a step"])
                except RuntimeError as raised:
                    errors.append(str(raised))
                    break
            else:
                assert max(counts) > min(counts) or got == sum(counts)
    return [str(warning.message) for warning in caught], errors


@pytest.mark.parametrize(
    ("counts", "batches", "first", "debug"),
    [
        ((3, 7), 2, 1, False),
        ((7, 2), 1, 1, False),
        ((0, 3), 0, 1, False),
        ((4, 7), 2, 3, False),
        ((3, 7), 2, 1, True),
    ],
)
def test_parts_that_differ_raise_in_the_step_that_another_process_does_not_make(
    world, counts, batches, first, debug
):
    env = {"ACCELERATE_DEBUG_MODE": "1"} if debug else {}
    results = world.run(gathers_parts, counts, first, env=env)
    more, less = counts.index(max(counts)), counts.index(min(counts))
    told, errors = results[more]

    assert results[less] == ([], [])
    assert len(errors) == 2  # in each epoch
    assert f"process {less} has only {batches} batches of the DataLoaderShard over Part" in errors[0]
    assert f"process {more} is in step {batches + 1}, as each process was given its own shard" in errors[0]
    assert "prepare the full dataset on every process" in errors[0]
    if first == 1 and batches:  # else it is not yet known when the step begins
        assert f"Process {less} has only {batches} batches of this loader" in told[0]
        assert "join_uneven_inputs([model]):`, or prepare the full dataset" in told[0]
    assert len(told) <= 2


@pytest.mark.parametrize("count", [4, 5])
def test_equal_parts_are_silent(world, count):
    assert world.run(gathers_parts, (count, count)) == [([], [])] * 2


def looked_into() -> list[int]:
    """Passes of which one process makes one alone, or does not come to the end, do no harm."""
    accelerator, loader = make_parts((4, 7))
    if accelerator.is_main_process:
        next(iter(loader))
    sizes = []
    with warnings.catch_warnings(action="ignore"):  # a step is begun that process 0 does not make
        for _ in range(2):
            for step, _ in enumerate(loader, 1):
                if step == 2:  # where process 0 is at the end
                    break
            for step, batch in enumerate(loader, 1):
                if step > 2:
                    break
                sizes.append(len(accelerator.gather_for_metrics(batch)))
    return sizes


def test_passes_that_are_not_made_by_all_do_no_harm(world):
    assert world.run(looked_into) == [[4, 4, 4, 4]] * 2


def trains_on_parts() -> list[str]:
    accelerator, loader = make_parts((3, 7))
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model]):
            for batch in loader:
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


def test_training_on_parts_inside_of_a_join_is_silent(world):
    assert world.run(trains_on_parts) == [[], []]
