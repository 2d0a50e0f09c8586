"""Loaders of torchdata, where it is installed (the extra `stateful`)."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data import (
    DataLoaderConfiguration,
    SeedableRandomSampler,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from accel_state.process.state import current_process

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def prepare(loader, **kwargs):
    return prepare_data_loader(loader, num_processes=2, process_index=1, dispatch_batches=False, **kwargs)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("asked", [True, False])
def test_a_stream_is_read_by_a_loader_of_torchdata(workers, asked):
    kind = DataLoader if asked else stateful.StatefulDataLoader
    loader = prepare(kind(Stream(23), 4, num_workers=workers), use_stateful_dataloader=asked)
    expected = [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 0]]
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == expected
    assert isinstance(loader, stateful.StatefulDataLoader)
    loader.load_state_dict({**loader.state_dict(), "consumed": 8, "batches": 1})

    assert [batch.tolist() for batch in loader] == expected[1:]
    assert [batch.tolist() for batch in skip_first_batches(loader, 2)] == expected[2:]


def test_a_plain_loader_that_skips_stays_one_of_torchdata():
    loader = skip_first_batches(stateful.StatefulDataLoader(range(9), 4), 1)

    assert isinstance(loader, stateful.StatefulDataLoader)
    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [8]]


def test_the_configuration_takes_it():
    assert DataLoaderConfiguration(use_stateful_dataloader=True).use_stateful_dataloader


def shuffled(length=23, rank=0, size=1, **kwargs):
    loader = stateful.StatefulDataLoader(range(length), 3, shuffle=True, **kwargs)
    return prepare_data_loader(loader, num_processes=size, process_index=rank)


def samples(loader):
    return [index for batch in loader for index in batch.tolist()]


@pytest.mark.parametrize("batched", [False, True])
def test_a_sampler_of_torchdata_is_cut_and_not_walked(batched):
    torch.manual_seed(5)
    sampler = stateful.sampler.RandomSampler(range(23))
    sampling = (
        {"batch_sampler": torch.utils.data.BatchSampler(sampler, 3, False)}
        if batched
        else {"batch_size": 3, "sampler": sampler}
    )
    loader = prepare_data_loader(
        stateful.StatefulDataLoader(range(23), **sampling), num_processes=1, process_index=0
    )

    assert isinstance(get_sampler(loader), SeedableRandomSampler)
    assert get_sampler(loader).initial_seed == sampler.generator.initial_seed()
    assert type(loader.batch_sampler.batch_sampler) is torch.utils.data.BatchSampler
    first, second = samples(loader), samples(loader)
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_loader_of_torchdata_continues_on_other_processes(workers):
    torch.manual_seed(5)
    loader = shuffled(num_workers=workers)
    order = samples(loader)
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    del iterator
    torch.manual_seed(6)  # a new run draws another seed; the state has the old one
    seen = []
    for rank in range(2):
        again = shuffled(rank=rank, size=2, num_workers=workers)
        again.load_state_dict(state)
        for batch in again:
            real = again.real_samples[rank] if again.real_samples else None
            seen += batch.tolist()[:real]

    assert sorted(seen) == sorted(order[6:])


def test_the_users_generator_is_kept():
    def make():
        return stateful.StatefulDataLoader(
            range(23), 3, shuffle=True, generator=torch.Generator().manual_seed(7)
        )

    loader = prepare_data_loader(make(), num_processes=1, process_index=0)
    plain = DataLoader(range(23), 3, shuffle=True, generator=torch.Generator().manual_seed(7))

    assert [samples(loader) for _ in range(2)] == [samples(plain) for _ in range(2)]


def seeded_apart():
    torch.manual_seed(current_process().rank)
    loader = prepare_data_loader(stateful.StatefulDataLoader(range(12), 2, shuffle=True))
    return samples(loader)


def test_processes_that_are_seeded_differently_share_one_order(world):
    first, second = world.run(seeded_apart)

    assert sorted(first + second) == list(range(12))
