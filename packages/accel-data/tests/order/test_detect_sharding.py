"""Loaders that are already sharded, in any way: used unchanged, or rejected on every process."""

import warnings

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, Subset
from torch.utils.data.distributed import DistributedSampler

from accel_data import DataLoaderShard, prepare_data_loader
from accel_data.order.detect_sharding import find_sharding
from accel_state.process.state import current_process

pytestmark = pytest.mark.usefixtures("fresh_state")


class Mine(DistributedSampler):
    """A subclass with its own order."""

    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


class Wrapped(Sampler):
    """A sampler around one that shards."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self):
        return len(self.sampler)


class Buckets(Sampler):
    """A batch sampler of another class, with a sampler inside."""

    batch_size = 2
    drop_last = False

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(BatchSampler(self.sampler, 2, False))

    def __len__(self):
        return -(-len(self.sampler) // 2)


class PerRank(Sampler):
    """A sampler for one process, with attributes named by choice."""

    def __init__(self, length, rank, size, names):
        self.indices = range(rank, length, size)
        for name, value in zip(names, (rank, size), strict=True):
            setattr(self, name, value)

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class PerRankBatches(PerRank):
    batch_size = 2

    def __iter__(self):
        return iter([list(self.indices[i : i + 2]) for i in range(0, len(self.indices), 2)])

    def __len__(self):
        return -(-len(self.indices) // 2)


class Part:
    """A map-style dataset that holds the samples of one process, and says so."""

    def __init__(self, length, rank, size):
        self.samples = list(range(length))[rank::size]
        self.rank, self.world_size = rank, size

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class PartStream(IterableDataset):
    def __init__(self, length, rank, size):
        self.length = length
        self.dp_rank, self.dp_world_size = rank, size

    def __iter__(self):
        return iter(range(self.dp_rank, self.length, self.dp_world_size))


class Around(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(self.dataset)


def distributed(kind, rank, size, length=12):
    return kind(range(length), size, rank, shuffle=False)


def pairs(length, rank, size):
    names = ("process_index", "num_processes")
    return PerRank(length, rank, size, names)


KINDS = {
    "sampler": lambda rank, size: DataLoader(
        range(12), 2, sampler=distributed(DistributedSampler, rank, size)
    ),
    "subclass": lambda rank, size: DataLoader(range(12), 2, sampler=distributed(Mine, rank, size)),
    "wrapped": lambda rank, size: DataLoader(
        range(12), 2, sampler=Wrapped(distributed(DistributedSampler, rank, size))
    ),
    "in a batch sampler": lambda rank, size: DataLoader(
        range(12), batch_sampler=BatchSampler(distributed(DistributedSampler, rank, size), 2, False)
    ),
    "in a custom batch sampler": lambda rank, size: DataLoader(
        range(12), batch_sampler=Buckets(distributed(Mine, rank, size))
    ),
    "in a sampler of batches": lambda rank, size: DataLoader(
        torch.arange(12),
        batch_size=None,
        sampler=BatchSampler(distributed(DistributedSampler, rank, size), 2, False),
    ),
    "unbatched": lambda rank, size: DataLoader(
        torch.arange(12).view(6, 2), batch_size=None, sampler=distributed(DistributedSampler, rank, size, 6)
    ),
    "sampler with num_processes": lambda rank, size: DataLoader(range(12), 2, sampler=pairs(12, rank, size)),
    "batch sampler with world_size": lambda rank, size: DataLoader(
        range(12), batch_sampler=PerRankBatches(12, rank, size, ("rank", "world_size"))
    ),
    "dataset": lambda rank, size: DataLoader(Part(12, rank, size), 2),
    "shuffled dataset": lambda rank, size: DataLoader(Part(12, rank, size), 2, shuffle=True),
    "dataset in a dataset": lambda rank, size: DataLoader(Subset(Part(12, rank, size), range(12 // size)), 2),
    "stream": lambda rank, size: DataLoader(PartStream(12, rank, size), 2),
    "stream in a stream": lambda rank, size: DataLoader(Around(PartStream(12, rank, size)), 2),
}


def read(loader):
    return [index for batch in loader for index in batch.reshape(-1).tolist()]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_is_for_this_process_passes_through(kind, size):
    loaders = [
        prepare_data_loader(KINDS[kind](rank, size), num_processes=size, process_index=rank)
        for rank in range(size)
        if size > 1 or "stream" not in kind  # on one process there is nothing to pass through
    ]
    for rank, loader in enumerate(loaders):
        assert isinstance(loader, DataLoaderShard)
        expected = sorted(read(KINDS[kind](rank, size)))
        for _ in range(2):
            assert sorted(read(loader)) == expected  # not split twice
        if kind != "unbatched":
            assert loader.total_batch_size == 2 * size


@pytest.mark.parametrize("place", [(1, 2), (0, 3), (0, 1), (2, 4)])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_is_for_another_process_is_rejected(kind, place):
    loader = KINDS[kind](2, 3)
    here = f"this is process {place[0]} of {place[1]}"
    message = rf"is for process 2 of 3, but {here}\. Pass (the full dataset|a loader)"
    with pytest.raises(ValueError, match=message):
        prepare_data_loader(loader, num_processes=place[1], process_index=place[0])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_is_sharded_is_not_dispatched(kind):
    with pytest.raises(ValueError, match="process 0 would send only its own shard"):
        prepare_data_loader(KINDS[kind](0, 2), num_processes=2, process_index=0, dispatch_batches=True)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"shuffled dataset"}))
@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_continues_where_it_was(kind, workers):
    def make():
        loader = KINDS[kind](1, 2)
        loader.num_workers = workers
        return prepare_data_loader(loader, num_processes=2, process_index=1)

    loader = make()
    order = read(loader)
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    del iterator

    assert read(again) == order[2:]


@pytest.mark.parametrize("kind", ["dataset", "stream", "sampler with num_processes"])
def test_another_number_of_processes_cannot_continue_with_shares(kind):
    loader = prepare_data_loader(KINDS[kind](0, 2), num_processes=2, process_index=0)
    state = loader.state_dict()
    again = prepare_data_loader(KINDS[kind](0, 3), num_processes=3, process_index=0)
    with pytest.raises(ValueError, match=r"was sharded over 2 processes .* it is sharded over 3 processes"):
        again.load_state_dict(state)


@pytest.mark.parametrize("kind", ["sampler", "in a batch sampler"])
def test_what_a_distributed_sampler_deals_out_continues_on_another_number(kind):
    loader = prepare_data_loader(KINDS[kind](0, 2), num_processes=2, process_index=0)
    next(iter(loader))
    state = loader.state_dict()
    seen = []
    for rank in range(3):
        again = prepare_data_loader(KINDS[kind](rank, 3), num_processes=3, process_index=rank)
        again.load_state_dict(state)
        seen += read(again)

    assert sorted(set(seen)) == [*range(3, 12)]  # a step of three processes lies over the place


def test_nothing_is_found_in_other_loaders():
    for loader in (
        DataLoader(range(4), shuffle=True),
        DataLoader(Around(range(4))),
        DataLoader(torch.ones(3)),
    ):
        assert find_sharding(loader) is None


def refused(kind):
    """Prepare a loader that is right on process 0 alone."""
    rank = current_process().rank
    make = {
        "place": lambda: KINDS["sampler"](0, 2),
        "missing": lambda: DataLoader(range(12), 2, sampler=None if rank else pairs(12, 0, 2)),
        "length": lambda: DataLoader(range(12 + rank), 2),
        "batch size": lambda: DataLoader(range(12), 2 + rank),
        "subset": lambda: DataLoader(Subset(range(12), list(range(rank, 12, 2))), 2),
    }[kind]
    with pytest.raises(
        ValueError, match=r"is for process|is not\. Make|different data|different batch"
    ) as error:
        prepare_data_loader(make())
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("place", "its DistributedSampler is for process 0 of 2, but this is process 1 of 2"),
        ("missing", r"of process 0 is already sharded, but that of the processes \[1\] is not"),
        ("length", "12 on process 0, 13 on process 1"),
        ("batch size", "different batch sizes: 2 on process 0, 3 on process 1"),
        ("subset", "different data in their Subset .*Pass a seed to whatever shuffles or splits"),
    ],
)
def test_every_process_raises(world, kind, message):
    first, second = world.run(refused, kind, size=2)

    assert first == second
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(first)


def parts():
    rank = current_process().rank
    loader = prepare_data_loader(DataLoader(Part(7, rank, 2), 2))
    return loader.total_dataset_length, [batch.tolist() for batch in loader], loader.state_dict()["length"]


def test_the_length_of_all_parts_is_known(world):
    assert world.run(parts, size=2) == [(7, [[0, 2], [4, 6]], 7), (7, [[1, 3], [5]], 7)]


class Noting:
    """A whole dataset that has its process's number for messages."""

    def __init__(self, names):
        process = current_process()
        for name, value in zip(names, (process.rank, process.world_size), strict=True):
            setattr(self, name, value)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


class NotingStream(Noting, IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize("dispatch", [None, True])
@pytest.mark.parametrize("kind", ["dataset", "sampler"])
def test_a_rejection_says_what_to_do_with_attributes_that_mean_something_else(kind, dispatch):
    place = (2, 0) if dispatch else (3, 0)
    with pytest.raises(ValueError, match="already") as error:
        prepare_data_loader(
            KINDS[kind](0, 2), num_processes=place[0], process_index=place[1], dispatch_batches=dispatch
        )

    assert ("If its rank and world_size mean something else" in str(error.value)) == (kind == "dataset")


def told_of(kind, *args):
    """Prepare a loader on two processes; return the warnings."""
    data = {
        "dataset": lambda: Noting(args),
        "stream": lambda: NotingStream(args),
        "part": lambda: Part(args[0], current_process().rank, 2),
        "subset": lambda: Subset(Noting(("rank", "world_size")), range(current_process().rank, 8, 2)),
    }[kind]()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        prepare_data_loader(DataLoader(data, 2))
    return [str(warning.message) for warning in told]


@pytest.mark.parametrize("kind", ["dataset", "stream"])
@pytest.mark.parametrize("names", [("rank", "world_size"), ("process_index", "num_processes")])
def test_a_dataset_that_may_be_whole_is_reported_once(world, kind, names):
    first, second = world.run(told_of, kind, *names)

    (message,) = first
    assert f"has {names[0]}=0 and {names[1]}=2" in message
    assert "each of them reads all of it" in message
    assert second == []


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("part", (7,)),  # 4 and 3 samples
        ("subset", ()),
        ("dataset", ("rank", "num_replicas")),
        ("stream", ("dp_rank", "dp_world_size")),
    ],
)
def test_nothing_is_reported_of_a_dataset_that_holds_a_part(world, kind, args):
    assert world.run(told_of, kind, *args) == [[], []]
