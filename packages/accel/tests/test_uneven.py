"""Processes with fewer batches than others: told before they leave the others waiting."""

from __future__ import annotations

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


class Part(IterableDataset):
    """A stream of one process, which says so."""

    def __init__(self, count: int, rank: int, size: int) -> None:
        self.count = count
        self.rank, self.world_size = rank, size

    def __iter__(self):
        return iter(torch.ones(self.count, 1))


def read(kind: str, count: int, even: bool = False, drop_last: bool = False) -> tuple[list[str], int]:
    """Iterate a loader; return what was told, and the number of its batches."""
    dispatch = False if kind == "stream" else None
    config = DataLoaderConfiguration(even_batches=even, dispatch_batches=dispatch)
    accelerator = Accelerator(dataloader_config=config)
    rank, size = accelerator.process_index, accelerator.num_processes
    data = {
        "map": torch.ones(count, 1),
        "sampler of batches": torch.ones(count, 1),
        "stream": Stream(count),
        "dispatched stream": Stream(count),
        "part": Part(count + rank, rank, size),
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
        ("dispatched stream", 5, {}, "may give some processes fewer batches than others", [2, 1]),
        ("part", 4, {}, "may give some processes fewer batches than others", [2, 3]),
    ],
)
def test_uneven_batches_are_told_on_every_process(world, kind, count, options, message, numbers):
    results = world.run(read, kind, count, **options)

    assert [number for _, number in results] == numbers
    for told, _ in results:
        assert len(told) == (message is not None)
        assert message is None or message in told[0]


def test_one_process_has_nobody_to_wait_for():
    assert read("map", 5) == ([], 3)


def trained() -> tuple[int, float]:
    """Train on five samples, inside of the join that the warning names: nothing is told."""
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
    (first, weight), (second, other) = world.run(trained, timeout_s=30)

    assert (first, second) == (2, 1)
    assert weight == other
