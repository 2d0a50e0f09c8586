"""What cannot work: a clear error on every process of a real run before a deadline, and none left waiting."""

import os
import signal
import time

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data import prepare_data_loader, skip_first_batches
from accel_state.process.state import current_process

pytestmark = pytest.mark.usefixtures("fresh_state")

DEADLINE_S = 60
"""Half of how long a process would wait for one that is gone, as its process group has it.

Where a worker dies torch takes up to 15 seconds on an idle machine: 5 until it looks after its workers, and,
for one that lives on, 5 until it is ended and 5 after that. The rest is for a busy machine.
"""
LENGTH = 12


class NoLength:
    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __init__(self, length=LENGTH):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Batches:
    """A batch sampler that says a batch size."""

    drop_last = False

    def __init__(self, batch_size, batches=((0, 1), (2, 3))):
        self.batch_size = batch_size
        self.batches = batches

    def __iter__(self):
        return iter([list(batch) for batch in self.batches])

    def __len__(self):
        return len(self.batches)


def loaded(change=None, shuffle=False, other=None):
    """Load a changed state, or that of another loader."""

    def run():
        loader = prepare_data_loader(DataLoader(range(LENGTH), 2, shuffle=shuffle), data_seed=1)
        source = loader if other is None else prepare_data_loader(other(), data_seed=1)
        loader.load_state_dict({**source.state_dict(), **(change or {})})

    return run


def prepared(make, read=False, **kwargs):
    def run():
        loader = prepare_data_loader(make(), **kwargs)
        if read:
            list(loader)

    return run


UNEVEN = ((0, 1), (2,), (3, 4))
CASES = {
    "no length": (prepared(lambda: DataLoader(NoLength(), 2)), "NoLength has no __len__.*pass a sampler"),
    "no length, dispatched": (
        prepared(lambda: DataLoader(NoLength(), 2), dispatch_batches=True),
        "NoLength has no __len__",
    ),
    "length of a stream": (
        lambda: len(prepare_data_loader(DataLoader(Stream(), 2), dispatch_batches=False)),
        "has no len",
    ),
    "batch size 0": (
        prepared(lambda: DataLoader(range(LENGTH), batch_sampler=Batches(0))),
        "must be a positive integer, but Batches.batch_size is 0",
    ),
    "batch size -2": (
        prepared(lambda: DataLoader(range(LENGTH), batch_sampler=Batches(-2)), dispatch_batches=True),
        "must be a positive integer, but Batches.batch_size is -2",
    ),
    "torch's batch size -1": (prepared(lambda: DataLoader(range(LENGTH), -1)), "batch_size"),
    "torch's batch size -1 of a stream": (prepared(lambda: DataLoader(Stream(), -1)), "batch_size"),
    "another batch size than it says": (
        prepared(lambda: DataLoader(range(LENGTH), batch_sampler=Batches(2, UNEVEN)), read=True),
        "says batch_size=2, but its batch 1 has 1 indices.*even_batches=False",
    ),
    "unknown batch size": (
        prepared(lambda: DataLoader(range(LENGTH), batch_sampler=[[0, 1], [2, 3]]), split_batches=True),
        "split_batches=True needs a batch size, but list has none",
    ),
    "unknown batch size, split": (
        prepared(lambda: DataLoader(range(LENGTH), batch_sampler=[[0, 1], [2, 3]]), split_batches=True),
        "split_batches=True needs a batch size, but list has none",
    ),
    "items that cannot be padded": (
        prepared(lambda: DataLoader(range(LENGTH + 1), None)),
        "its 13 items cannot be padded.*even_batches=False",
    ),
    "split that does not divide": (
        prepared(lambda: DataLoader(range(LENGTH), 3), split_batches=True),
        "3 does not divide by 2. Use a batch size of 2 or 4",
    ),
    "split of a stream that does not divide": (
        prepared(lambda: DataLoader(Stream(), 3), split_batches=True, dispatch_batches=False),
        "3 does not divide by 2",
    ),
    "split of a dispatched stream that does not divide": (
        prepared(lambda: DataLoader(Stream(), 3), split_batches=True),
        "3 does not divide by 2",
    ),
    "split that does not divide, dispatched": (
        prepared(lambda: DataLoader(range(LENGTH), 3), split_batches=True, dispatch_batches=True),
        "3 does not divide by 2",
    ),
    "state of another length": (loaded({"length": 13}), "over 13 samples, but this dataset has 12"),
    "state of another dataset": (
        loaded(other=lambda: DataLoader(range(20), 2)),
        "over 20 samples, but this dataset has 12",
    ),
    "state of a stream": (
        loaded(other=lambda: DataLoader(Stream(), 2)),
        "over a stream .* but this is a dataset that is read by index",
    ),
    "state of a shuffled loader": (
        loaded(other=lambda: DataLoader(range(LENGTH), 2, shuffle=True)),
        "a shuffled loader, but this is an unshuffled one",
    ),
    "cursor beyond the end": (loaded({"consumed": 13}), "consumed=13: an epoch of this loader has 12"),
    "cursor before the start": (loaded({"consumed": -1}), "consumed=-1: it must be an integer of at least 0"),
    "no state": (loaded({"version": 7}, shuffle=True), "version 7"),
    "skip": (
        lambda: skip_first_batches(prepare_data_loader(DataLoader(range(LENGTH), 2)), -4),
        "batches to skip must be 0 or more, but it is -4",
    ),
}


def raised(name):
    with pytest.raises((ValueError, TypeError)) as error:
        CASES[name][0]()
    return str(error.value)


def raised_by_all():
    return {name: raised(name) for name in CASES}


def test_every_process_raises(world):
    first, second = world.run(raised_by_all, timeout_s=DEADLINE_S)
    for name, (_, message) in CASES.items():
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(first[name])
        assert first[name] == second[name], name


def die():
    time.sleep(0.3)  # until the loader waits: torch's signal handler raises wherever it is
    os.kill(os.getpid(), signal.SIGKILL)


class Dying(IterableDataset):
    """A stream whose second worker is killed at its second batch."""

    def __iter__(self):
        info = get_worker_info()
        for index in range(100):
            if info.id == 1 and index == 6:
                die()
            yield index


class DyingTable:
    """A dataset whose reader of sample 9 is killed."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 9:
            die()
        return index


def loses_a_worker(kind, dispatch):
    loader = DataLoader(Dying() if kind == "stream" else DyingTable(), 2, num_workers=2)
    loader = prepare_data_loader(loader, dispatch_batches=dispatch)
    try:
        list(loader)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", ["stream", "table"])
def test_a_worker_that_dies_is_noticed(world, kind, dispatch):
    messages = world.run(loses_a_worker, kind, dispatch, timeout_s=DEADLINE_S)
    failed = [message for message in messages if message is not None]

    # Without dispatching a process reads by itself: the one that did not need sample 9 is not concerned.
    assert len(failed) == (1 if kind == "table" and not dispatch else 2)
    for message in failed[: 1 if dispatch else 2]:
        assert "worker" in message
        assert "exited unexpectedly" in message or "killed by signal" in message
    if dispatch:
        assert "Process 0" in failed[1]


def raises_while_reading(dispatch):
    class Broken(Stream):
        def __iter__(self):
            yield from range(5)
            raise OSError(f"no disk on process {current_process().rank}")

    loader = prepare_data_loader(DataLoader(Broken(), 2), dispatch_batches=dispatch)
    with pytest.raises((OSError, RuntimeError), match="no disk on process") as error:
        list(loader)
    return str(error.value)


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_dataset_that_fails_is_named_on_every_process(world, dispatch):
    first, second = world.run(raises_while_reading, dispatch, timeout_s=DEADLINE_S)

    assert "no disk on process 0" in first
    assert f"no disk on process {0 if dispatch else 1}" in second
