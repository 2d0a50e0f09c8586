"""Runs that are stopped in the middle of an epoch and continue, on other processes and with other workers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel.accelerator import Accelerator
from accel_ckpt.errors import CheckpointError
from accel_data.config import DataLoaderConfiguration

pytestmark = pytest.mark.usefixtures("fresh_state")

LENGTH = 41


class Recorded(Dataset):
    """Notes which samples are read (where no workers read them)."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(LENGTH))


class Stateful(Stream):
    """A stream that can go to any place of its own."""

    def __init__(self) -> None:
        self.next = 0
        self.read: list[int] = []

    def __iter__(self):
        while self.next < LENGTH:
            self.next += 1
            self.read.append(self.next - 1)
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict:
        return {"next": self.next}

    def load_state_dict(self, state: dict) -> None:
        self.next = state["next"]


KINDS = {
    "shuffled": Recorded,
    "dispatched": Recorded,
    "stream": Stream,
    "stateful": Stateful,
    "each reads": Stateful,
}
BATCH_SIZE = 2


def prepared(kind: str, workers: int):
    dispatch = {"dispatched": True, "each reads": False}.get(kind)
    config = DataLoaderConfiguration(dispatch_batches=dispatch, data_seed=3)
    accelerator = Accelerator(dataloader_config=config)
    data = KINDS[kind]()
    shuffle = isinstance(data, Recorded)
    loader = DataLoader(data, BATCH_SIZE, num_workers=workers, shuffle=shuffle)
    return accelerator, accelerator.prepare(loader), data


def gathered(accelerator, loader, steps: int | None = None) -> list[int]:
    """Return the samples of some steps, or of all, in the global order."""
    seen = []
    for step, batch in enumerate(loader, 1):
        seen += accelerator.gather_for_metrics(batch).tolist()
        if step == steps:
            break
    return seen


def stopped(kind: str, workers: int, steps: int, folder: str) -> tuple[list[list[int]], list[int]]:
    """Return whole epochs, and what is seen in the second one until the state is saved."""
    accelerator, loader, _ = prepared(kind, workers)
    epochs = [gathered(accelerator, loader) for _ in range(3)]
    loader.set_epoch(0)
    gathered(accelerator, loader)
    seen = gathered(accelerator, loader, steps)
    accelerator.save_state(folder)
    return epochs, seen


def resumed(kind: str, workers: int, skip: int | None, folder: str) -> tuple[list[int], list[int], list[int]]:
    """Return the rest of the second epoch, the third one, and the samples read for the former."""
    accelerator, loader, data = prepared(kind, workers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*: saved on . and loaded on . processes")
        accelerator.load_state(folder)
    rest = gathered(accelerator, loader if skip is None else accelerator.skip_first_batches(loader, skip))
    read = list(getattr(data, "read", []))
    return rest, gathered(accelerator, loader), read


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("size", "workers", "steps"), [(1, 0, 7), (2, 2, 3), (3, 0, 2)])
def test_a_run_continues_exactly_where_it_was(world, tmp_path, kind, size, workers, steps):
    folder = str(tmp_path / "state")
    epochs, seen = world.run(stopped, kind, workers, steps, folder, size=size)[0]
    assert sorted(epochs[1]) == list(range(LENGTH))
    assert seen == epochs[1][: steps * BATCH_SIZE * size]

    for other, other_workers in ((1, 2), (2, 0), (3, 0)):
        # The first batches of the epoch, as the run that was stopped counts them: the same data.
        for skip in (None, steps):
            results = world.run(resumed, kind, other_workers, skip, folder, size=other)
            for rest, following, _ in results:
                assert seen + rest == epochs[1], (other, skip)
                assert following == epochs[2]
            everything = [index for _, _, read in results for index in read]
            step = BATCH_SIZE * other
            if kind in ("shuffled", "dispatched") and not other_workers:
                padding = epochs[1][: -len(rest) % step]
                assert sorted(everything) == sorted(rest + padding)
            first = step if kind in ("stateful", "each reads") else None  # padding comes from there
            if first and not other_workers:
                assert set(everything) == {*range(first), *rest}


def interrupted_often(kind: str, folder: str) -> list[int]:
    """Save and load after each step of an epoch, each time into new objects."""
    seen: list[int] = []
    for step in range(LENGTH):
        accelerator, loader, _ = prepared(kind, 0)
        if step:
            accelerator.load_state(folder)
        seen += gathered(accelerator, loader, 1)
        accelerator.save_state(folder)
        if len(seen) >= LENGTH:
            break
    return seen


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_run_may_be_interrupted_at_every_step(world, tmp_path, kind):
    (first, second) = world.run(interrupted_often, kind, str(tmp_path / "state"))

    assert first == second
    assert sorted(first) == list(range(LENGTH))


STEPS = 3  # that the script below takes in an epoch on 2 processes: 11 samples, 4 at a time


def documented(way: str | None, folder: str, dispatch: bool) -> list[int]:
    """Run a script of 3 epochs that saves at the last batch of its first, or continues from there.

    Args:
        way: How it finds where it was: by loading alone, by its number of steps, or by the number of its
            epoch and that of the batch in it. None for the run that saves.
    """
    config = DataLoaderConfiguration(dispatch_batches=dispatch, data_seed=3)
    accelerator = Accelerator(dataloader_config=config)
    loader = accelerator.prepare(DataLoader(Numbers(), BATCH_SIZE, shuffle=True))
    starting_epoch, resume_step, overall_step = 0, None, 0
    if way is not None:
        accelerator.load_state(folder)
        starting_epoch, overall_step = 1, STEPS
        resume_step = {"load": None, "steps": overall_step % STEPS, "epoch and batch": STEPS}[way]
    seen = []
    for epoch in range(starting_epoch, 3):
        active = loader
        if epoch == starting_epoch and resume_step is not None:
            active = accelerator.skip_first_batches(loader, resume_step)
        for batch in active:
            seen += accelerator.gather_for_metrics(batch).tolist()
            overall_step += 1
            if way is None and overall_step == STEPS:
                accelerator.save_state(folder)
    return seen


class Numbers(Recorded):
    def __len__(self) -> int:
        return 11


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_script_saved_at_the_last_batch_of_an_epoch_continues_with_the_next(world, tmp_path, dispatch):
    folder = str(tmp_path / "state")
    whole = world.run(documented, None, folder, dispatch)[0]
    epochs = [whole[start : start + 11] for start in range(0, 33, 11)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)

    for way in ("load", "steps", "epoch and batch"):
        assert world.run(documented, way, folder, dispatch)[0] == epochs[1] + epochs[2], way


def wrong_dataset(folder: str) -> str:
    accelerator, loader, _ = prepared("shuffled", 0)
    next(iter(loader))
    accelerator.save_state(folder)
    other = Accelerator()
    other.prepare(DataLoader(torch.ones(LENGTH + 1), BATCH_SIZE, shuffle=True))
    with pytest.raises(
        CheckpointError, match=f"over {LENGTH} samples, but this dataset has {LENGTH + 1}"
    ) as error:
        other.load_state(folder)
    return str(error.value)


def test_a_state_of_another_dataset_is_rejected_on_every_process(world, tmp_path):
    first, second = world.run(wrong_dataset, str(tmp_path / "state"))

    assert first == second
