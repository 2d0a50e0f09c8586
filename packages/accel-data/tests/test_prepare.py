import inspect
import random
import sys
from itertools import cycle, zip_longest
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from accel_data import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    sample_seed,
    skip_first_batches,
)
from accel_data.order import global_order
from accel_data.order.presharded_sampler import PreshardedBatchSampler
from accel_ops.rng import set_seed
from accel_state.gradient import GradientState
from accel_state.process.state import current_process

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("fresh_state")]


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length
        self.epochs = []

    def __iter__(self):
        return iter(range(self.length))

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Recorded:
    """A dataset that notes what is read."""

    def __init__(self, length):
        self.length = length
        self.read = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return index


class GlobalShuffle:
    """A sampler that draws from Python's and torch's global generators."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        indices = torch.randperm(self.length).tolist()
        random.shuffle(indices)
        return iter(indices)


class LengthBuckets(BatchSampler):
    """A batch sampler of another class with its own generator."""

    def __init__(self, length, batch_size, drop_last):
        super().__init__(range(length), batch_size, drop_last)
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        self.sampler = torch.randperm(len(self.sampler), generator=self.generator).tolist()
        return super().__iter__()

    def __len__(self):
        return super().__len__()


def prepared(make, num_processes, **kwargs):
    return [
        prepare_data_loader(make(), num_processes=num_processes, process_index=rank, **kwargs)
        for rank in range(num_processes)
    ]


def epoch_of(loaders):
    """Read an epoch in lockstep; return the real samples in rank order, and the batches of each process."""
    samples, batches = [], [[] for _ in loaders]
    iterators = [iter(loader) for loader in loaders]
    done = False
    while not done:
        done = True
        reals = set()
        for rank, (loader, iterator) in enumerate(zip(loaders, iterators, strict=True)):
            batch = next(iterator, None)
            if batch is None:
                continue
            done = False
            batches[rank].append(batch.tolist())
            reals.add(loader.real_samples)
            assert loader.batch_rows is None or loader.batch_rows[rank] == len(batch)
            assert (loader.batch_rows is None) == (loader.real_samples is None)
            real = loader.real_samples[rank] if loader.real_samples else None
            samples += batch.tolist()[:real]
        assert len(reals) <= 1  # the processes agree about the padding
    return samples, batches


def check_sizes(batches, share, even, drop_last, split):
    """Check that all batches are full but for the last step, and that one as far as it can be."""
    for step, parts in enumerate(zip_longest(*batches, fillvalue=[])):
        sizes = list(map(len, parts))
        if step < len(batches[0]) - 1 or drop_last or (even and not split):
            assert sizes == [share] * len(sizes)
        assert 0 < sizes[0] <= share
        assert sizes[0] - sizes[-1] <= (0 if even else 1)


def expected_padding(length, group, drop_last):
    full, remainder = divmod(length, group)
    return full * group if drop_last else length, full + bool(remainder and not drop_last)


KINDS = {
    "sequential": lambda n: {},
    "shuffle": lambda n: {"shuffle": True},
    "generator": lambda n: {"shuffle": True, "generator": torch.Generator().manual_seed(4)},
    "replacement": lambda n: {"sampler": RandomSampler(range(n), replacement=True, num_samples=n)},
    "subset": lambda n: {"sampler": SubsetRandomSampler(range(n))},
    "weighted": lambda n: {
        "sampler": WeightedRandomSampler(torch.ones(n), n, generator=torch.Generator().manual_seed(5))
    },
    "global": lambda n: {"sampler": GlobalShuffle(n)},
    "list": lambda n: {"sampler": list(range(n))[::-1]},
}

sizes = st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(1, 8))


@given(sizes, st.sampled_from(sorted(KINDS)), st.booleans(), st.booleans(), st.booleans())
def test_processes_together_see_what_one_would(size, kind, split, even, drop_last):
    length, batch_size, processes = size
    batch_size *= processes if split else 1
    group = batch_size if split else batch_size * processes

    def make():
        return DataLoader(range(length), batch_size, drop_last=drop_last, **KINDS[kind](length))

    options = {"data_seed": 11, "split_batches": split, "even_batches": even}
    one = prepare_data_loader(
        DataLoader(range(length), 1, **KINDS[kind](length)), num_processes=1, process_index=0, data_seed=11
    )
    loaders = prepared(make, processes, **options)
    for _ in range(2):
        order = [int(batch) for batch in one]
        samples, batches = epoch_of(loaders)
        count, steps = expected_padding(length, group if processes > 1 else batch_size, drop_last)

        assert samples == order[:count]
        assert len(loaders[0]) == len(batches[0]) == steps
        assert [len(loader) for loader in loaders] == [len(some) for some in batches]
        assert [*loaders[0].batch_sampler.batches_per_rank] == [len(some) for some in batches]
        assert not loaders[0].batch_sampler.is_even or len({len(some) for some in batches}) == 1
        check_sizes(batches, group // processes, even and processes > 1, drop_last, split)
        if processes > 1 and (even or drop_last):
            assert {len(rank) for rank in batches} == {steps}


@given(sizes, st.booleans(), st.booleans(), st.booleans())
def test_processes_together_see_a_stream_once(size, split, even, drop_last):
    length, batch_size, processes = size
    batch_size *= processes if split else 1
    group = batch_size if split else batch_size * processes

    def make():
        return DataLoader(Stream(length), batch_size, drop_last=drop_last)

    options = {"split_batches": split, "even_batches": even, "dispatch_batches": False}
    loaders = prepared(make, processes, **options)
    for _ in range(2):
        samples, batches = epoch_of(loaders)
        count, steps = expected_padding(length, group, drop_last)

        assert samples == list(range(count))
        assert len(batches[0]) == steps
        check_sizes(batches, group // processes, even and processes > 1, drop_last, split)
        if processes > 1 and (even or drop_last):
            assert {len(rank) for rank in batches} == {steps}


@given(sizes, st.booleans())
def test_a_batch_sampler_of_another_class_is_sharded(size, drop_last):
    length, batch_size, processes = size

    def make():
        return DataLoader(range(length), batch_sampler=LengthBuckets(length, batch_size, drop_last))

    one = [index for batch in make() for index in batch.tolist()]
    samples, _ = epoch_of(prepared(make, processes))

    assert (
        samples
        == one[: expected_padding(length, batch_size * processes, drop_last)[0] if processes > 1 else None]
    )


@given(st.lists(st.integers(1, 5), max_size=20), st.integers(1, 8), st.integers(1, 8), st.integers(0, 6))
def test_batches_of_varying_size_stay_whole(sizes, processes, later, steps):
    batches = [list(range(sum(sizes[:number]), sum(sizes[: number + 1]))) for number in range(len(sizes))]

    def make():
        return DataLoader(range(sum(sizes)), batch_sampler=batches)

    loaders = prepared(make, processes, even_batches=False)
    steps = min(steps, len(batches) // processes)
    iterators = [iter(loader) for loader in loaders]
    seen = [[next(iterator).tolist() for iterator in iterators] for _ in range(steps)]
    state = loaders[0].state_dict()
    again = prepared(make, later, even_batches=False)
    for loader in again:
        loader.load_state_dict(state)

    assert [batch for step in seen for batch in step] == batches[: steps * processes]
    left = batches[steps * processes :] or batches  # of the next epoch, if this one has ended
    assert [[batch.tolist() for batch in loader] for loader in again] == [
        left[rank::later] for rank in range(later)
    ]
    assert [[batch.tolist() for batch in loader] for loader in again] == [
        batches[rank::later] for rank in range(later)
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("processes", "persistent"), [(1, True), (3, False)])
def test_workers_change_nothing(stream, processes, persistent):
    def make(**workers):
        if stream:
            return lambda: DataLoader(Stream(29), 2, **workers)
        return lambda: DataLoader(range(29), 2, shuffle=True, **workers)

    options = {"data_seed": 1, "dispatch_batches": False}
    without = prepared(make(), processes, **options)
    with_two = prepared(make(num_workers=2, persistent_workers=persistent), processes, **options)
    for _ in range(2):
        assert epoch_of(with_two) == epoch_of(without)


class Divided(Stream):
    """A stream that divides itself over the workers, each of which ends with its own padding."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, self.length, info.num_workers))


def test_padding_in_the_middle_of_a_stream_is_known():
    for length in (21, 23):
        loaders = prepared(lambda: DataLoader(Divided(length), 4, num_workers=2), 2, dispatch_batches=False)  # noqa: B023
        samples, batches = epoch_of(loaders)

        assert sorted(samples) == list(range(length))
        assert {len(batch) for rank in batches for batch in rank} == {4}


def test_the_order_changes_with_epoch_and_seed_only():
    def epochs(**kwargs):
        loader = prepare_data_loader(
            DataLoader(range(50), 5, shuffle=True), num_processes=1, process_index=0, **kwargs
        )
        return [[int(index) for batch in loader for index in batch] for _ in range(3)]

    torch.manual_seed(1)
    first = epochs()
    torch.manual_seed(1)
    torch.rand(1)

    assert epochs() == first
    assert first[0] != first[1] != first[2]
    torch.manual_seed(2)
    assert epochs() != first
    assert epochs(data_seed=1) != epochs(data_seed=2)


def test_two_loaders_of_one_accelerator_differ():
    torch.manual_seed(1)
    state = GradientState.new()
    first, second = (
        prepare_data_loader(
            DataLoader(range(50), 5, shuffle=True), num_processes=1, process_index=0, gradient_state=state
        )
        for _ in range(2)
    )

    assert torch.cat(list(first)).tolist() != torch.cat(list(second)).tolist()


def test_set_seed_gives_the_same_orders_however_many_loaders_were_prepared():
    state = GradientState.new()

    def orders():
        set_seed(1)
        seeds = DataLoader(range(50), collate_fn=lambda samples: torch.tensor([*map(sample_seed, samples)]))
        loaders = [
            prepare_data_loader(loader, num_processes=1, process_index=0, gradient_state=state)
            for loader in (*(DataLoader(range(50), 5, shuffle=True) for _ in range(2)), seeds)
        ]
        return [torch.cat(list(loader)).tolist() for loader in loaders]

    first = orders()

    assert orders() == orders() == first
    assert first[0] != first[1]  # two loaders of one trial differ


@pytest.mark.parametrize("workers", [0, 2])
def test_the_users_generator_keeps_its_order(workers):
    def make():
        generator = torch.Generator().manual_seed(9)
        return DataLoader(range(23), 4, shuffle=True, generator=generator, num_workers=workers)

    plain = make()
    ours = prepare_data_loader(make(), num_processes=1, process_index=0)
    for _ in range(2):
        assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in plain]


def test_use_seedable_sampler_replaces_the_users_generator():
    generator = torch.Generator().manual_seed(9)
    loader = prepare_data_loader(
        DataLoader(range(23), 4, shuffle=True, generator=generator),
        num_processes=1,
        process_index=0,
        use_seedable_sampler=True,
    )
    sampler = get_sampler(loader)

    assert isinstance(sampler, SeedableRandomSampler)
    assert sampler.initial_seed == 9


def record_worker(worker_id):
    """A worker_init_fn."""


SETTINGS = {
    "num_workers": 2,
    "pin_memory": True,
    "timeout": 7.0,
    "worker_init_fn": record_worker,
    "multiprocessing_context": "fork",
    "prefetch_factor": 3,
    "persistent_workers": True,
    "pin_memory_device": "",
    "in_order": True,
    "collate_fn": list,
}


@pytest.mark.parametrize("dataset", [range(20), Stream(20)])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_settings_are_kept(dataset, dispatch, skip):
    settings = {**SETTINGS, "generator": torch.Generator(), "drop_last": True}
    given_loader = DataLoader(dataset, 4, **settings)
    loader = prepare_data_loader(given_loader, num_processes=1, process_index=0, dispatch_batches=dispatch)
    if skip:
        loader = skip_first_batches(loader, 2)

    assert isinstance(loader, DataLoader)
    for name in settings:
        assert getattr(loader, name) == getattr(given_loader, name), name
    assert loader.batch_size == 4
    assert prepare_data_loader(loader) is loader


def test_there_are_no_other_settings():
    """A new parameter of torch's DataLoader must be kept too, and tested above."""
    sampling = {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}

    assert set(inspect.signature(DataLoader.__init__).parameters) - {"self"} == sampling | set(SETTINGS)


@pytest.mark.parametrize("dispatch", [False, True])
def test_settings_are_used(dispatch):
    settings = {**SETTINGS, "pin_memory": False, "multiprocessing_context": None, "collate_fn": tuple}
    one = {"num_processes": 1, "process_index": 0, "data_seed": 2, "dispatch_batches": dispatch}
    workers = prepare_data_loader(DataLoader(range(21), 4, shuffle=True, **settings), **one)
    alone = prepare_data_loader(DataLoader(range(21), 4, shuffle=True, collate_fn=tuple), **one)
    for _ in range(2):
        batches = list(workers)
        assert batches == list(alone)
        assert {type(batch) for batch in batches} == {tuple}
    assert list(skip_first_batches(workers, 4)) == list(alone)[4:]


def test_settings_are_kept_when_a_plain_loader_skips():
    for dataset in (range(20), Stream(20)):
        given_loader = DataLoader(dataset, 4, **SETTINGS)
        loader = skip_first_batches(given_loader, 2)
        for name in SETTINGS:
            assert getattr(loader, name) == getattr(given_loader, name), name


def test_attributes_of_a_prepared_loader():
    loader = prepare_data_loader(
        DataLoader(range(21), 4, shuffle=True), num_processes=2, process_index=1, data_seed=0
    )
    halves = prepare_data_loader(
        DataLoader(range(21), 4), num_processes=2, process_index=1, split_batches=True
    )
    stream = prepare_data_loader(
        DataLoader(Stream(5), 4), num_processes=2, process_index=1, dispatch_batches=False
    )

    assert (loader.total_batch_size, loader.total_dataset_length, loader.batch_size) == (8, 21, 4)
    assert (halves.total_batch_size, halves.total_dataset_length, halves.batch_size) == (4, 21, 2)
    assert (stream.total_batch_size, stream.batch_size) == (8, 4)
    assert isinstance(loader.batch_sampler, BatchSamplerShard)
    assert isinstance(stream.dataset, IterableDatasetShard)
    assert loader.sampler is loader.get_sampler() is get_sampler(loader)


@pytest.mark.parametrize("skip", [0, 2, 5])
def test_skipping_seeks(skip):
    data = Recorded(23)
    loader = prepare_data_loader(
        DataLoader(data, 4, shuffle=True), num_processes=1, process_index=0, data_seed=3
    )
    order = [batch.tolist() for batch in loader]
    loader.set_epoch(0)
    data.read.clear()
    skipped = skip_first_batches(loader, skip)

    assert [batch.tolist() for batch in skipped] == order[skip:]
    assert len(skipped) == len(order) - skip
    assert data.read == [index for batch in order[skip:] for index in batch]
    assert skipped.iteration == loader.iteration == 1
    assert [batch.tolist() for batch in loader] != order  # the next epoch, and all of it
    assert loader.iteration == skipped.iteration == 2


def test_skipping_a_stream():
    loader = prepare_data_loader(
        DataLoader(Stream(23), 4), num_processes=2, process_index=0, dispatch_batches=False
    )
    skipped = skip_first_batches(skip_first_batches(loader, 1), 1)

    assert [batch.tolist() for batch in skipped] == [[16, 17, 18, 19]]
    assert skipped.real_samples == (4, 3)


@pytest.mark.parametrize("batch_size", [4, None])
def test_skipping_with_a_plain_loader(batch_size):
    data = Recorded(10)
    skipped = skip_first_batches(DataLoader(data, batch_size), 2)

    assert torch.cat(
        [batch.reshape(-1) if batch_size else torch.tensor([batch]) for batch in skipped]
    ).tolist() == list(range(8 if batch_size else 2, 10))
    assert data.read == list(range(8 if batch_size else 2, 10))
    assert len(skipped) == (1 if batch_size else 8)


class Epochs(Stream):
    """A stream of another hundred in every epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(100 * self.epoch, 100 * self.epoch + self.length))


@pytest.mark.parametrize("workers", [0, 1])
def test_skipping_keeps_the_epoch_of_a_plain_stream(workers):
    data = Epochs(6)
    data.set_epoch(3)
    loader = DataLoader(data, 2, num_workers=workers)
    skipped = skip_first_batches(loader, 1)

    for _ in range(2):
        assert torch.cat(list(skipped)).tolist() == torch.cat(list(loader)).tolist()[2:] == [*range(302, 306)]
    data.set_epoch(4)
    assert torch.cat(list(skipped)).tolist() == [*range(402, 406)]
    skipped.set_epoch(6)
    assert torch.cat(list(skipped)).tolist() == [*range(602, 606)]
    assert torch.cat(list(skipped)).tolist() == [*range(702, 706)]


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("first", ["set_epoch", "skip"])
def test_skipping_keeps_the_epoch_of_a_prepared_loader(first, dispatch):
    loader = prepare_data_loader(
        DataLoader(Epochs(6), 2), num_processes=1, process_index=0, dispatch_batches=dispatch
    )
    torch.cat(list(loader))
    if first == "set_epoch":
        loader.set_epoch(3)
        skipped = skip_first_batches(loader, 1)
    else:
        skipped = skip_first_batches(loader, 1)
        loader.set_epoch(3)

    assert torch.cat(list(skipped)).tolist() == [*range(302, 306)]
    assert torch.cat(list(loader)).tolist() == [*range(400, 406)]


class Sized(Stream):
    def __len__(self):
        return self.length


@pytest.mark.parametrize(
    ("data", "options", "has"),
    [
        (range(10), {}, "has 3"),
        (Sized(10), {"dispatch_batches": False}, "has 3"),
        (Sized(10), {"dispatch_batches": True}, "has 3"),
        (Stream(10), {"dispatch_batches": False}, "has no more"),
        (Stream(10), {"dispatch_batches": True}, "has no more"),
        (Sized(10), None, "has 3"),
        (Stream(10), None, "has no more"),
    ],
)
def test_skipping_more_than_there_is_gives_an_empty_pass_and_a_warning(data, options, has):
    loader = DataLoader(data, 4)
    if options is not None:
        loader = prepare_data_loader(loader, num_processes=1, process_index=0, **options)
    skipped = skip_first_batches(loader, 4)

    for epoch in range(2):
        message = f"Nothing is left of epoch {epoch} after skipping 4 batches: the loader {has}"
        with pytest.warns(UserWarning, match=message):
            assert list(skipped) == []
    assert len(list(loader)) == 3
    if has == "has 3":
        assert list(skip_first_batches(loader, 3)) == []  # it is left out as a whole: nothing to tell


def test_skipping_more_than_a_plain_loader_has_is_reported():
    with pytest.warns(UserWarning, match="Nothing is left after skipping 4 batches: the loader has 3"):
        skipped = skip_first_batches(DataLoader(range(10), 4), 4)

    assert list(skipped) == []


def test_skipping_with_a_plain_loader_over_a_stream():
    skipped = skip_first_batches(DataLoader(Stream(10), 4), 2)

    assert isinstance(skipped, SkipDataLoader)
    assert [batch.tolist() for batch in skipped] == [[8, 9]]
    with pytest.raises(ValueError, match="Prepare that one first"):
        prepare_data_loader(skipped, num_processes=1, process_index=0)


def test_a_distributed_sampler_passes_through():
    def make(rank):
        return DataLoader(range(21), 4, sampler=DistributedSampler(range(21), 2, rank))

    loaders = [prepare_data_loader(make(rank), num_processes=2, process_index=rank) for rank in range(2)]
    assert isinstance(loaders[0].batch_sampler, PreshardedBatchSampler)
    assert (loaders[0].total_batch_size, loaders[0].batch_size) == (8, 4)
    first, _ = epoch_of(loaders)
    second, _ = epoch_of(loaders)
    assert sorted(first) == sorted(second) == list(range(21))
    assert first != second  # set_epoch is called
    assert loaders[0].remainder == 21 % 8


def test_a_shard_of_the_user_passes_through():
    batches = BatchSampler(SequentialSampler(range(8)), 2, False)
    loader = DataLoader(range(8), batch_sampler=BatchSamplerShard(batches, 2, 1))
    stream = DataLoader(IterableDatasetShard(Stream(8), 2, num_processes=2, process_index=1), 2)

    place = {"num_processes": 2, "process_index": 1}
    assert [batch.tolist() for batch in prepare_data_loader(loader, **place)] == [[2, 3], [6, 7]]
    assert [batch.tolist() for batch in prepare_data_loader(stream, **place)] == [[2, 3], [6, 7]]


class PerRank:
    num_replicas, rank = 4, 1

    def __iter__(self):
        return iter([0])

    def __len__(self):
        return 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DataLoader(range(8), sampler=DistributedSampler(range(8), 4, 1)),
            "its DistributedSampler is for process 1 of 4, but this is process 0 of 2.*num_replicas=2, ",
        ),
        (lambda: DataLoader(range(8), sampler=PerRank()), "its PerRank is for process 1 of 4"),
        (
            lambda: DataLoader(range(8), batch_sampler=BatchSamplerShard([[0]], 4, 1, even_batches=False)),
            "its BatchSamplerShard is for process 1 of 4, but this is process 0 of 2",
        ),
        (
            lambda: DataLoader(IterableDatasetShard(Stream(8), num_processes=2, process_index=1)),
            "its IterableDatasetShard is for process 1 of 2, but this is process 0 of 2",
        ),
    ],
)
def test_what_is_sharded_for_others_is_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        prepare_data_loader(make(), num_processes=2, process_index=0, dispatch_batches=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(range(8), sampler=DistributedSampler(range(8), 1, 0)),
        lambda: DataLoader(range(8), batch_sampler=BatchSamplerShard([[0]])),
        lambda: DataLoader(IterableDatasetShard(Stream(8))),
    ],
)
def test_what_is_sharded_is_not_dispatched(make):
    with pytest.raises(ValueError, match=r"process 0 would send only its own shard.*dispatch_batches=False"):
        prepare_data_loader(make(), num_processes=1, process_index=0, dispatch_batches=True)


def test_batch_size_none():
    def make(length):
        return lambda: DataLoader(range(length), batch_size=None)

    def items(loaders):
        return [list(loader) for loader in loaders]

    assert items(prepared(make(6), 2)) == [[0, 2, 4], [1, 3, 5]]
    assert items(prepared(make(5), 2, even_batches=False)) == [[0, 2, 4], [1, 3]]
    assert [len(loader) for loader in prepared(make(5), 2, even_batches=False)] == [3, 2]
    with pytest.raises(ValueError, match=r"its 5 items cannot be padded .* 2 processes.*even_batches=False"):
        prepared(make(5), 2)


def test_batch_size_none_with_a_sampler_of_batches():
    def make():
        sampler = BatchSampler(SequentialSampler(range(10)), 4, False)
        return DataLoader(torch.arange(10), batch_size=None, sampler=sampler)

    samples, batches = epoch_of(prepared(make, 2))

    assert samples == list(range(10))
    assert batches == [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]]


def test_batch_size_none_with_a_stream_of_batches():
    class Batches(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(10).split(2))

    samples, batches = epoch_of(prepared(lambda: DataLoader(Batches(), None), 2, dispatch_batches=False))

    assert samples == list(range(10))
    assert batches[1] == [[2, 3], [6, 7], [0, 1]]


def test_a_stream_gets_its_epoch():
    data = Stream(3)
    loader = prepare_data_loader(DataLoader(data), num_processes=1, process_index=0)
    list(loader)
    list(loader)

    assert data.epochs == [0, 1]


def test_dispatch_is_the_default_for_streams_only():
    assert isinstance(prepare_data_loader(DataLoader(Stream(3))), DataLoaderDispatcher)
    assert isinstance(prepare_data_loader(DataLoader(range(3))), DataLoaderShard)
    assert isinstance(prepare_data_loader(DataLoader(range(3)), dispatch_batches=True), DataLoaderDispatcher)
    with pytest.raises(ValueError, match="num_processes=2: process 0 has 1 to serve"):
        prepare_data_loader(DataLoader(Stream(3)), num_processes=2, process_index=0)


def test_batches_are_put_on_the_device():
    loader = prepare_data_loader(
        DataLoader([{"x": torch.ones(2), "name": "a"}], 1), torch.device("meta"), put_on_device=True
    )
    (batch,) = loader

    assert batch["x"].device.type == "meta"
    assert batch["name"] == ["a"]
    (batch,) = prepare_data_loader(DataLoader(torch.ones(1)), torch.device("meta"))
    assert batch.device.type == "cpu"


def test_custom_classes_are_made():
    class Mine(DataLoaderShard):
        pass

    loader = DataLoader(range(3))

    assert type(prepare_data_loader(loader, custom_classes={DataLoaderShard: Mine})) is Mine
    with pytest.raises(ValueError, match="keys must be DataLoaderShard or DataLoaderDispatcher"):
        prepare_data_loader(loader, custom_classes={DataLoaderDispatcher: Mine})


def test_what_a_subclass_does_in_iter_is_not_lost_in_silence():
    class Mine(DataLoader):
        def __iter__(self):
            return iter([])

    with pytest.warns(UserWarning, match="Mine has its own __iter__"):
        assert len(list(prepare_data_loader(Mine(range(3))))) == 3


class Repeating:
    """Goes over a sampler again and again."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


class RepeatingWithLength(Repeating):
    def __len__(self):
        return len(self.sampler)


class BrokenLength(Repeating, BatchSampler):
    """Inherits a length, for which it lacks attributes."""


class KeepsWorkers(DataLoader):
    """Keeps its workers alive by a sampler without end, as loaders did before persistent workers."""

    def __init__(self, *args, repeating, steps=None, **kwargs):
        super().__init__(*args, **kwargs)
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        self.steps = len(getattr(self, name)) if steps is None else steps
        object.__setattr__(self, name, repeating(getattr(self, name)))
        self.kept = super().__iter__()

    def __len__(self):
        return self.steps

    def __iter__(self):
        for _ in range(self.steps):
            yield next(self.kept)


@pytest.mark.parametrize("repeating", [Repeating, RepeatingWithLength, BrokenLength])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("batch_size", [4, None])
def test_the_length_of_a_subclass_ends_an_epoch_that_would_never_end(repeating, dispatch, batch_size):
    loader = KeepsWorkers(range(12), batch_size, shuffle=True, repeating=repeating)
    places = [{}] if dispatch else [{"num_processes": 3, "process_index": rank} for rank in range(3)]
    with pytest.warns(UserWarning, match="persistent_workers=True"):
        loaders = [prepare_data_loader(loader, dispatch_batches=dispatch, **place) for place in places]
    epochs = [
        [int(sample) for loader in loaders for batch in loader for sample in torch.as_tensor(batch).flatten()]
        for _ in range(2)
    ]

    assert sum(map(len, loaders)) == (12 if batch_size is None else 3)
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]


class WithoutEnd(Sampler):
    def __iter__(self):
        return cycle(range(12))


class WithoutEndButLength(WithoutEnd):
    def __len__(self):
        return 12


@pytest.mark.parametrize("sampler", [WithoutEnd, WithoutEndButLength])
@pytest.mark.parametrize("batch_size", [4, None])
def test_the_length_of_a_subclass_ends_an_epoch_of_a_sampler_without_end(sampler, batch_size):
    loader = KeepsWorkers(range(12), batch_size, sampler=sampler(), repeating=lambda inner: inner, steps=3)
    with pytest.warns(UserWarning, match="persistent_workers=True"):
        prepared = prepare_data_loader(loader)
    epochs = [[torch.as_tensor(batch).flatten().tolist() for batch in prepared] for _ in range(2)]

    size = batch_size or 1
    assert epochs == [[list(range(start, start + size)) for start in range(0, 3 * size, size)]] * 2


class HasLength(DataLoader):
    """Has a length of its own, and the iteration of torch, which would never end."""

    def __len__(self):
        return 3


@pytest.mark.parametrize("make", [DataLoader, HasLength])
def test_a_sampler_that_repeats_its_length_without_end_is_refused(make):
    repeating = RepeatingWithLength(BatchSampler(range(12), 4, drop_last=False))
    for options in ({"sampler": WithoutEndButLength(), "batch_size": 4}, {"batch_sampler": repeating}):
        loader = prepare_data_loader(make(range(12), **options), num_processes=2, process_index=0)
        with pytest.raises(ValueError, match=r"repeat without end: its length is \d+, and it gave 200000"):
            next(iter(loader))


@pytest.mark.parametrize("length", [sys.maxsize, 10**9])
def test_a_sampler_with_a_huge_length_is_refused_before_its_entries_fill_the_memory(length, monkeypatch):
    class Huge(WithoutEnd):
        def __len__(self):
            return length

    monkeypatch.setattr(global_order, "_LISTED_AT_MOST", 300_000)
    loader = prepare_data_loader(DataLoader(range(12), 4, sampler=Huge()))
    with pytest.raises(ValueError, match=f"repeat without end: its length is {length}, and it gave 300000"):
        next(iter(loader))


def test_a_sampler_may_give_more_than_its_length():
    class Estimated(Sampler):
        def __iter__(self):
            return iter(range(150_000))

        def __len__(self):
            return 110_000

    loader = prepare_data_loader(DataLoader(range(150_000), 50_000, sampler=Estimated()))
    assert [len(batch) for batch in loader] == [50_000] * 3


def test_an_epoch_may_be_shorter_than_the_data():
    loader = KeepsWorkers(range(12), 2, repeating=lambda sampler: sampler, steps=4)
    with pytest.warns(UserWarning, match="persistent_workers=True"):
        prepared = prepare_data_loader(loader)

    assert [batch.tolist() for batch in prepared] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(prepared) == 4


def test_ignored_settings_are_reported():
    with pytest.warns(UserWarning, match="slice_fn_for_dispatch is ignored"):
        prepare_data_loader(DataLoader(range(3)), slice_fn_for_dispatch=lambda *args, **kwargs: None)
    with pytest.warns(UserWarning, match="in_order=False"):
        loader = prepare_data_loader(DataLoader(range(3), num_workers=1, in_order=False))
    assert loader.in_order is False
    loader = DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0))
    with pytest.warns(UserWarning, match="split_batches=True is ignored"):
        prepare_data_loader(loader, num_processes=2, process_index=0, split_batches=True)


class NoLength:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("make", "kwargs", "error", "message"),
    [
        (lambda: [1, 2], {}, TypeError, r"takes a torch.utils.data.DataLoader, but got a list: \[1, 2\]"),
        (lambda: DataLoader(range(4)), {"rng_types": ["tpu"]}, ValueError, "tpu"),
        (
            lambda: DataLoader(range(4)),
            {"data_seed": "1"},
            TypeError,
            "data_seed must be an integer or None.*'1'",
        ),
        (lambda: DataLoader(range(4), 3), {"split_batches": True}, ValueError, "3 does not divide by 2"),
        (
            lambda: DataLoader(Stream(4), 3),
            {"split_batches": True, "dispatch_batches": False},
            ValueError,
            "3 does not divide by 2",
        ),
        (lambda: DataLoader(NoLength()), {}, ValueError, "NoLength has no __len__"),
        (
            lambda: DataLoader(range(4), batch_sampler=[[0], [1, 2]]),
            {"split_batches": True},
            ValueError,
            "list has none.*split_batches=False",
        ),
        (
            lambda: DataLoader(range(4)),
            {"process_index": 2},
            ValueError,
            "below num_processes=2, but it is 2",
        ),
    ],
)
def test_bad_input_is_rejected(make, kwargs, error, message):
    with pytest.raises(error, match=message):
        prepare_data_loader(make(), **{"num_processes": 2, "process_index": 0, **kwargs})


@pytest.mark.parametrize(
    ("skip", "error", "message"),
    [(-1, ValueError, "-1"), ("2", TypeError, "'2'")],
)
def test_bad_skips_are_rejected(skip, error, message):
    with pytest.raises(error, match=message):
        skip_first_batches(prepare_data_loader(DataLoader(range(3))), skip)


def whole_orders(kind):
    """Read two epochs with generators that are seeded differently on every process."""
    rank = current_process().rank
    torch.manual_seed(rank)
    random.seed(rank)
    generator = torch.Generator().manual_seed(rank)
    loader = {
        "shuffle": lambda: DataLoader(range(20), 2, shuffle=True),
        "generator": lambda: DataLoader(range(20), 2, shuffle=True, generator=generator),
        "weighted": lambda: DataLoader(
            range(20), 2, sampler=WeightedRandomSampler(torch.ones(20), 20, False, generator=generator)
        ),
        "global": lambda: DataLoader(range(20), 2, sampler=GlobalShuffle(20)),
        "seedable": lambda: DataLoader(range(20), 2, sampler=SeedableRandomSampler(range(20))),
    }[kind]()
    ours = prepare_data_loader(loader)
    return [[batch.tolist() for batch in ours] for _ in range(2)]


@pytest.mark.parametrize("kind", ["shuffle", "generator", "weighted", "global", "seedable"])
def test_processes_that_are_seeded_differently_share_one_order(world, kind):
    results = world.run(whole_orders, kind, size=2)
    for epoch in range(2):
        assert sorted(i for result in results for batch in result[epoch] for i in batch) == list(range(20))
    assert results[0][0] != results[0][1]


def synchronised(rng_types):
    rank = current_process().rank
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    loader = DataLoader(range(4), 1, shuffle=True, generator=generator)
    next(iter(prepare_data_loader(loader, rng_types=rng_types, data_seed=0)))
    return torch.rand(1).item(), torch.rand(1, generator=generator).item()


@pytest.mark.parametrize(
    ("rng_types", "same"),
    [
        (None, (False, True)),
        (["torch"], (True, False)),
        (["torch", "generator"], (True, True)),
        ([], (False, False)),
    ],
)
def test_the_named_generators_are_synchronised(world, rng_types, same):
    first, second = world.run(synchronised, rng_types, size=2)

    assert tuple(one == other for one, other in zip(first, second, strict=True)) == same


class PrivateShuffle(GlobalShuffle):
    """A sampler whose generator is not accessible."""

    def __iter__(self):
        indices = list(range(self.length))
        random.Random(current_process().rank).shuffle(indices)
        return iter(indices)


def disagrees():
    loader = prepare_data_loader(DataLoader(range(8), 2, sampler=PrivateShuffle(8)))
    with pytest.raises(RuntimeError, match="does not give the same order on every process"):
        list(loader)


def test_samplers_that_disagree_are_noticed(world):
    world.run(disagrees, size=2)


class FailsOnProcess1:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if current_process().rank:
            raise OSError("disk")
        return index


def reads_while_another_fails():
    loader = prepare_data_loader(DataLoader(FailsOnProcess1(), 2, shuffle=True))
    if current_process().is_main:
        return len(list(loader))
    with pytest.raises(OSError, match="disk"):
        list(loader)
    return None


def test_batches_need_no_other_process(world):
    assert world.run(reads_while_another_fails, size=2) == [3, None]


def reads_for_itself():
    if current_process().is_main:
        for loader in (DataLoader(range(4), 2, shuffle=True), DataLoader(Stream(4), 2)):
            assert len(list(prepare_data_loader(loader, num_processes=1, process_index=0))) == 2


def test_one_process_may_read_for_itself(world):
    world.run(reads_for_itself, size=2)


def prepared_beside_a_recorder() -> list[str]:
    with mock.patch("accel_state.process.gloo_threads.atexit") as recorded:
        prepare_data_loader(DataLoader(range(4)))
    return [call.args[0].__name__ for call in recorded.register.call_args_list]


@pytest.mark.parametrize(("size", "called"), [(1, []), (2, ["wait_for_gloo_threads"])])
def test_processes_with_a_loader_wait_for_gloo_at_exit(world, size, called):
    assert world.run(prepared_beside_a_recorder, size=size) == [called] * size
