"""Random generators that are those of process 0 when an iteration begins."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from accel_data import prepare_data_loader
from accel_state.process.state import current_process

pytestmark = pytest.mark.usefixtures("fresh_state")


class Stream(IterableDataset):
    """Numbers from a generator, as many as wanted."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        return iter(torch.rand(12, generator=self.generator).tolist())


def make(kind, rank):
    generator = torch.Generator().manual_seed(rank)  # another one on each process
    if kind == "stream":
        return DataLoader(Stream(generator), 2), generator
    return DataLoader(range(12), 2, sampler=RandomSampler(range(12), generator=generator)), generator


def by_default(kind, dispatch):
    """Return for each epoch the state of the sampler's generator when it began, and the batches."""
    rank = current_process().rank
    loader, generator = make(kind, rank)
    loader = prepare_data_loader(loader, dispatch_batches=dispatch)
    seen = []
    for _ in range(3):
        torch.manual_seed(50 + rank)
        random.seed(60 + rank)
        states = []
        batches = []
        for batch in loader:
            states.append(loader._progress._latest.generator)
            batches.append(batch.tolist())
        if not dispatch:
            assert torch.rand(1) != torch.Generator().manual_seed(50)  # not touched
        seen.append((states[0].sum().item(), batches, random.random()))
        torch.rand(rank, generator=generator)  # apart again
    return seen


@pytest.mark.parametrize(("kind", "dispatch"), [("sampler", False), ("sampler", True), ("stream", False)])
def test_by_default_it_is_the_samplers_generator(world, kind, dispatch):
    first, second = world.run(by_default, kind, dispatch, size=2)

    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0]
        assert one[2] != other[2]
        assert not set(map(str, one[1])) & set(map(str, other[1]))


def named(dispatch, types):
    rank = current_process().rank
    torch.manual_seed(rank)
    loader, _ = make("sampler", rank)
    loader = prepare_data_loader(loader, dispatch_batches=dispatch, rng_types=types)
    drawn = []
    for _ in range(2):  # at the start of each iteration
        torch.rand(rank)
        drawn.append(next(torch.rand(1).item() for _ in loader))
    return drawn


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("types", [["torch"], ["torch", "generator"]])
def test_named_ones_at_the_start_of_each_iteration(world, dispatch, types):
    first, second = world.run(named, dispatch, types, size=2)

    assert first == second
    assert first[0] != first[1]


@pytest.mark.parametrize("dispatch", [False, True])
def test_none_if_none_is_named(world, dispatch):
    first, second = world.run(named, dispatch, [], size=2)

    assert first[0] != second[0]


class BadEpochs(Dataset):
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index

    def set_epoch(self, epoch):
        if current_process().rank == self.bad:
            raise OSError(f"no epoch {epoch}")


def fails_before(bad):
    rank = current_process().rank
    data = BadEpochs(bad)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(rank))
    loader = prepare_data_loader(DataLoader(data, 2, sampler=sampler), rng_types=["torch", "generator"])
    if rank == bad:
        with pytest.raises(OSError, match="no epoch 0"):
            next(iter(loader))
    else:
        next(iter(loader))
    dist.barrier()  # all are still in step
    return torch.rand(1).item()


@pytest.mark.parametrize("bad", [0, 1])
def test_a_process_that_fails_keeps_none_waiting(world, bad):
    world.run(fails_before, bad, size=3)


def fails_to_take(bad):
    rank = current_process().rank
    generator = torch.Generator().manual_seed(rank)
    loader = DataLoader(range(12), 2, sampler=RandomSampler(range(12), generator=generator))
    loader = prepare_data_loader(loader)
    if rank == bad:
        loader.synchronized_generator = BadGenerator()
        with pytest.raises(RuntimeError, match="generator is lost"):
            next(iter(loader))
    elif bad == 0:
        with pytest.raises(RuntimeError, match="generator is lost"):
            next(iter(loader))
    else:
        next(iter(loader))
    dist.barrier()


class BadGenerator:
    set_state = None

    def get_state(self):
        raise RuntimeError("generator is lost")


@pytest.mark.parametrize("bad", [0, 1])
def test_a_generator_without_a_state_keeps_none_waiting(world, bad):
    world.run(fails_to_take, bad, size=3)
