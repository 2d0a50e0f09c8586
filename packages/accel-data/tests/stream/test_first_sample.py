"""Streams of which each process has its own shard, whether they say so or not."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from accel_data import prepare_data_loader
from accel_state.process.state import current_process
from accel_world.warned import warns_once

pytestmark = pytest.mark.usefixtures("fresh_state")


class Numbers(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class SelfSharded(Numbers):
    """Asks torch for its rank, and for its worker."""

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return iter(range(rank + worker * world, self.length, world * workers))


class Part(Dataset):
    """The samples of one process, with indices."""

    def __init__(self, length):
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.samples = range(rank, length, world)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def epochs(loader):
    return [[sample for batch in loader for sample in batch.tolist()] for _ in range(2)]


def read_parts(data, length, workers, shuffle):
    loader = DataLoader(data(length), 2, num_workers=workers, shuffle=shuffle)
    return epochs(prepare_data_loader(loader, presharded=True))


@pytest.mark.parametrize("length", [2, 12, 13])
@pytest.mark.parametrize(
    ("data", "workers", "shuffle"),
    [(SelfSharded, 0, None), (SelfSharded, 2, None), (Part, 0, False), (Part, 0, True)],
)
def test_data_that_is_sharded_before_is_read_as_it_is(world, data, workers, shuffle, length):
    for rank, seen in enumerate(world.run(read_parts, data, length, workers, shuffle, size=2)):
        for samples in seen:
            assert sorted(samples) == list(range(rank, length, 2))


def rejected_parts(length, workers):
    loader = prepare_data_loader(
        DataLoader(SelfSharded(length), 2, num_workers=workers), dispatch_batches=False
    )
    with pytest.raises(ValueError, match=r"different first samples from SelfSharded.*presharded=True"):
        list(loader)


@pytest.mark.parametrize("length", [1, 12])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_shards_itself_is_not_sharded_again(world, length, workers):
    world.run(rejected_parts, length, workers, size=2)


def read_first(data, workers):
    rank = current_process().rank
    told = warns_once(UserWarning, r"SelfSharded reads the rank.*presharded=True")
    loader = prepare_data_loader(DataLoader(data(12), 2, num_workers=workers))
    with told if rank == 0 and data is SelfSharded else nullcontext():
        return epochs(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_shards_itself_is_reported_where_process_0_reads_for_all(world, workers):
    world.run(read_first, SelfSharded, workers, size=2)
    first, second = world.run(read_first, Numbers, workers, size=2)

    assert sorted(first[0] + second[0]) == sorted(first[1] + second[1]) == list(range(12))


def read_the_same(data):
    told = warns_once(UserWarning, "all of them read the same from (Numbers|Subset)")
    with told if current_process().rank == 0 else nullcontext():
        return epochs(prepare_data_loader(DataLoader(data, 2), presharded=True))


@pytest.mark.parametrize("data", [Numbers(4), Subset(range(8), range(4))])
def test_data_that_is_whole_on_each_process_is_reported(world, data):
    assert world.run(read_the_same, data, size=2) == [[list(range(4))] * 2] * 2


class Augmented(Numbers):
    def __init__(self, length, draws):
        super().__init__(length)
        self.draws = draws

    def __iter__(self):
        for number in range(self.length):
            yield number + (random.random() if self.draws else 0)


def read_augmented():
    random.seed(current_process().rank)
    loader = prepare_data_loader(DataLoader(Augmented(6, draws=True), 1), dispatch_batches=False)
    rank = current_process().rank
    with (
        warns_once(UserWarning, "uses the global random generators.*presharded=True")
        if not rank
        else nullcontext()
    ):
        return [int(batch) for batch in loader]


def test_random_augmentation_is_reported_and_continues(world):
    assert world.run(read_augmented, size=2) == [[0, 2, 4], [1, 3, 5]]


class Anything(Numbers):
    """Samples of all kinds, some of which look different on each process."""

    def __iter__(self):
        for number in range(self.length):
            yield {
                "names": {"a", "b", str(number)},
                "object": object(),
                "objects": np.array([object()]),
                "array": np.float32([number]),
                "complex": torch.tensor([1j * number]).conj(),
                "transposed": torch.full((2, 3), number, dtype=torch.bfloat16).T,
                "column": torch.full((2, 3), number)[:, 0],
                "expanded": torch.tensor([number]).expand(3),
                "scalar": torch.tensor(number),
                "sparse": torch.eye(2).to_sparse(),
                "nothing": None,
            }


def read_anything():
    loader = DataLoader(Anything(4), 1, collate_fn=lambda samples: int(samples[0]["scalar"]))
    return list(prepare_data_loader(loader, dispatch_batches=False))


def read_unknown():
    loader = DataLoader(Anything(4), 1, collate_fn=lambda samples: int(samples[0]["scalar"]))
    return list(prepare_data_loader(loader, presharded=True))


def test_samples_of_unknown_types_are_not_taken_for_equal_ones(world):
    assert world.run(read_unknown, size=2) == [[0, 1, 2, 3]] * 2  # a warning would be an error


def test_equal_samples_of_any_kind_pass(world):
    assert world.run(read_anything, size=2) == [[0, 2], [1, 3]]


def read_alone(workers):
    rank = current_process().rank
    loader = prepare_data_loader(DataLoader(Numbers(8), 2, num_workers=workers), dispatch_batches=False)
    alone = [batch.tolist() for batch in loader] if rank == 0 else None
    return alone, epochs(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_process_may_iterate_alone(world, workers):
    (alone, first), (_, second) = world.run(read_alone, workers, size=2)

    assert alone == [[0, 1], [4, 5]]
    assert first == [[0, 1, 4, 5]] * 2
    assert second == [[2, 3, 6, 7]] * 2
