from itertools import cycle, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from accel_data.order.global_order import SeedableRandomSampler
from accel_data.order.presharded_sampler import PreshardedBatchSampler
from accel_data.order.samplers import AllShards, BatchSamplerShard


class Declared(BatchSampler):
    """A batch sampler of another class, which must be walked."""

    def __iter__(self):
        yield from super().__iter__()


class Undeclared:
    """Batches of varying size."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


class Unsized:
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def chunks(entries, size):
    return [entries[i : i + size] for i in range(0, len(entries), size)]


def documented(batches, num_processes, split, even, drop_last, size):
    """Return what each process gets, as the documentation says it."""
    order = [index for batch in batches for index in batch]
    share = size // num_processes if split else size
    shards = [[] for _ in range(num_processes)]
    for step in [[batch] for batch in batches] if split else chunks(batches, num_processes):
        entries = [index for batch in step for index in batch]
        missing = share * num_processes - len(entries)
        if missing and drop_last:
            break
        if missing and even and num_processes > 1:
            entries += list(islice(cycle(order), missing))
        for rank, part in enumerate(chunks(entries, share)):
            shards[rank].append(part)
    return shards


cases = st.tuples(
    st.integers(0, 70),  # dataset
    st.integers(1, 6),  # batch size, times the processes when splitting
    st.integers(1, 8),  # processes
    st.booleans(),  # split
    st.booleans(),  # even
    st.booleans(),  # drop_last
)


@given(cases, st.sampled_from([BatchSampler, Declared]), st.sampled_from(["range", "seeded", "unsized"]))
def test_shards_are_as_documented(case, kind, order):
    length, size, processes, split, even, drop_last = case
    size *= processes if split else 1
    samplers = {
        "range": lambda: SequentialSampler(range(length)),
        "seeded": lambda: SeedableRandomSampler(range(max(length, 1)), data_seed=1),
        "unsized": lambda: Unsized(length),
    }
    make = samplers[order]
    expected = documented(
        list(BatchSampler(make(), size, drop_last)), processes, split, even, drop_last, size
    )
    for rank in range(processes):
        shard = BatchSamplerShard(kind(make(), size, drop_last), processes, rank, split, even)
        batches = list(shard)

        assert batches == expected[rank]
        if order != "unsized":
            assert shard.epoch_info.num_batches == len(batches)
            # How short the last batch of another class is shows only when it is walked.
            guessed = kind is Declared and split and not even
            assert len(shard) - len(batches) in ((0, 1) if guessed else (0,))


def test_documented_examples():
    def shard(rank, split):
        batches = BatchSampler(SequentialSampler(range(8)), 4, False)
        return list(BatchSamplerShard(batches, 2, rank, split))

    assert [shard(0, False), shard(1, False)] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert [shard(0, True), shard(1, True)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@given(st.lists(st.integers(1, 5), max_size=20), st.integers(1, 8))
def test_batches_of_unknown_size_are_distributed_unsplit(sizes, processes):
    batches = [[number] * size for number, size in enumerate(sizes)]
    shards = [
        list(BatchSamplerShard(Undeclared(batches), processes, rank, even_batches=False))
        for rank in range(processes)
    ]

    assert shards == [batches[rank::processes] for rank in range(processes)]


@given(st.lists(st.integers(1, 5), max_size=20), st.integers(1, 8), st.integers(0, 20), st.booleans())
def test_whole_batches_are_made_even_with_the_first_ones(sizes, processes, start, is_sized):
    batches = [[number] * size for number, size in enumerate(sizes)]
    steps = -(-len(batches) // processes)
    dealt = list(islice(cycle(batches), steps * processes)) if batches else []
    kept = []
    for rank in range(processes):
        shard = BatchSamplerShard(Undeclared(batches) if is_sized else iter(batches), processes, rank)
        if is_sized:
            assert shard.batches_per_rank == (steps,) * processes
            assert len(shard) == steps
            shard.set_start(start // processes * processes)
        got = list(shard)

        assert got == dealt[rank::processes][shard.start // processes :]
        if got:
            last = shard.epoch_info.last_rows
            kept.append(got[-1][: None if last is None else last.real[rank]])
            assert last is None or last.rows[rank] == len(got[-1])
    if kept:
        assert list(filter(None, kept)) == batches[(steps - 1) * processes :]


def test_a_longer_batch_than_declared_is_split_without_a_loss():
    class Buckets(Undeclared):
        batch_size = 2

    def shard(rank):
        buckets = Buckets([[0, 1], [2, 3, 4, 5, 6], [7, 8]])
        return list(BatchSamplerShard(buckets, 2, rank, True, even_batches=False, balance_last_step=True))

    assert [shard(0), shard(1)] == [[[0], [2, 3, 4], [7]], [[1], [5, 6], [8]]]


def test_declared_batches_of_varying_size_are_kept_without_even_batches():
    class Buckets(Undeclared):
        batch_size = 2

    buckets = Buckets([[0, 1], [2], [3, 4], [5]])

    assert list(BatchSamplerShard(buckets, 2, 1, even_batches=False)) == [[2], [5]]
    assert list(BatchSamplerShard(buckets, 2, 1, split_batches=True, even_batches=False)) == [[1], [4]]
    with pytest.raises(ValueError, match=r"batch_size=2, but its batch 1 has 1 indices.*even_batches=False"):
        list(BatchSamplerShard(buckets, 2, 1))


def test_a_too_large_batch_is_named():
    class Buckets(Undeclared):
        batch_size = 2

    with pytest.raises(ValueError, match="its batch 1 has 3 indices"):
        list(BatchSamplerShard(Buckets([[0, 1], [2, 3, 4]]), 2, 0))


@given(cases, st.integers(0, 70))
def test_a_pass_starts_at_any_position(case, start):
    length, size, processes, split, even, drop_last = case
    size *= processes if split else 1
    for rank in range(processes):
        shard = BatchSamplerShard(
            BatchSampler(SequentialSampler(range(length)), size, drop_last), processes, rank, split, even
        )
        whole = list(shard)
        shard.set_start(start // shard.step_size * shard.step_size)
        steps = shard.start // shard.step_size

        assert list(shard) == whole[steps:]


class Counted(list):
    """An order that counts which of its entries are taken."""

    def __init__(self, entries):
        super().__init__(entries)
        self.taken = []

    def __getitem__(self, where):
        found = super().__getitem__(where)
        self.taken += found if isinstance(where, slice) else [found]
        return found

    def __iter__(self):
        raise AssertionError("the order is walked")


@given(cases, st.integers(0, 20))
def test_a_process_takes_its_own_share_of_the_order_and_no_more(case, steps):
    length, size, processes, split, even, drop_last = case
    size *= processes if split else 1
    for rank in range(processes):
        order = Counted(range(length))
        shard = BatchSamplerShard(
            BatchSampler(SequentialSampler(order), size, drop_last), processes, rank, split, even
        )
        shard._order = lambda order=order: order
        shard.set_start(steps * shard.step_size)
        seen = [index for batch in shard for index in batch]

        assert sorted(order.taken) == sorted(seen)


def shares_of_torchs_samplers():
    for sampler in (
        SequentialSampler(range(50)),
        RandomSampler(range(50), generator=torch.Generator().manual_seed(1)),
        SeedableRandomSampler(range(50), data_seed=1),
    ):
        shard = BatchSamplerShard(BatchSampler(sampler, 4, False), 4, 3)
        shard.set_start(16)
        yield list(shard), len(shard)


@pytest.mark.parametrize(
    "order_sampler", [BatchSampler, SequentialSampler, RandomSampler, SeedableRandomSampler]
)
def test_torchs_samplers_are_never_walked(monkeypatch, order_sampler):
    expected = list(shares_of_torchs_samplers())
    monkeypatch.setattr(order_sampler, "__iter__", lambda self: pytest.fail("it is walked"))

    assert list(shares_of_torchs_samplers()) == expected
    assert [len(batches) for batches, _ in expected] == [3] * 3


class Walks:
    """A sampler that counts how often it is walked, and how far."""

    batch_size = 4

    def __init__(self, entries):
        self.entries = entries
        self.walks = self.given = 0

    def __len__(self):
        return len(self.entries)

    def __iter__(self):
        self.walks += 1
        for entry in self.entries:
            self.given += 1
            yield entry


@pytest.mark.parametrize("processes", [1, 2, 8])
@pytest.mark.parametrize("start", [0, 32])
@pytest.mark.parametrize("batched", [False, True])
def test_other_samplers_are_walked_once(processes, start, batched):
    walks = Walks(chunks(list(range(70)), 4) if batched else range(70))
    shard = BatchSamplerShard(walks if batched else BatchSampler(walks, 4, False), processes, 0)
    shard.set_start(start)
    for epoch in (1, 2):
        assert next(index for batch in shard for index in batch) == start
        assert (walks.walks, walks.given) == (epoch, epoch * len(walks))


@given(st.integers(0, 70), st.integers(1, 5), st.integers(1, 8))
def test_all_shards_take_turns(length, size, processes):
    def make(kind, *place):
        return list(kind(BatchSampler(SequentialSampler(range(length)), size, False), *place))

    all_batches = make(AllShards, processes, 0)
    alone = [make(BatchSamplerShard, processes, rank) for rank in range(processes)]

    assert all_batches == [batch for step in zip(*alone, strict=True) for batch in step]


@given(
    st.integers(1, 40), st.integers(1, 5), st.integers(1, 8), st.booleans(), st.booleans(), st.integers(0, 5)
)
def test_the_padding_of_a_distributed_sampler_is_known(length, size, processes, shuffle, drop_last, steps):
    kept, passed_over = [], []
    for rank in range(processes):
        sampler = DistributedSampler(range(length), processes, rank, shuffle=shuffle)
        shard = PreshardedBatchSampler(BatchSampler(sampler, size, drop_last), sampler, (rank, processes))
        batches = list(shard)
        if shard.epoch_info.last_rows is not None:
            batches[-1] = batches[-1][: shard.epoch_info.last_rows.real[rank]]
        kept += [index for batch in batches for index in batch]
        shard.set_start(steps * shard.step_size)
        passed_over.append(list(shard))

        assert passed_over[-1] == list(BatchSampler(sampler, size, drop_last))[steps:]

    assert len(set(kept)) == len(kept)
    if not drop_last:
        assert sorted(kept) == list(range(length))


def test_the_epoch_reaches_the_sampler():
    sampler = SeedableRandomSampler(range(20), data_seed=0)
    shard = BatchSamplerShard(BatchSampler(sampler, 4, False), 2, 0)
    first = list(shard)
    shard.set_epoch(1)
    second = list(shard)
    shard.set_epoch(0)

    assert first != second
    assert list(shard) == first


def test_facts_of_a_shard():
    batches = BatchSampler(SequentialSampler(range(22)), 4, False)
    shard, halves = BatchSamplerShard(batches, 2, 1), BatchSamplerShard(batches, 2, 1, split_batches=True)

    assert (shard.total_length, shard.batch_size, shard.local_batch_size, shard.step_size) == (6, 4, 4, 8)
    assert (halves.local_batch_size, halves.step_size, shard.num_samples) == (2, 4, 22)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_processes": 0}, "num_processes must be at least 1, but it is 0"),
        ({"num_processes": 2, "process_index": 2}, "below num_processes=2, but it is 2"),
        ({"num_processes": 3, "split_batches": True}, "4 does not divide by 3. Use a batch size of 3 or 6"),
        ({"num_processes": 8, "split_batches": True}, "4 does not divide by 8. Use a batch size of 8"),
    ],
)
def test_places_and_sizes_that_do_not_fit_are_rejected(kwargs, message):
    with pytest.raises(ValueError, match=message):
        BatchSamplerShard(BatchSampler(SequentialSampler(range(8)), 4, False), **kwargs)


def test_a_batch_size_is_needed_to_split_batches():
    with pytest.raises(ValueError, match="split_batches=True needs a batch size, but list has none"):
        BatchSamplerShard([[0], [1, 2]], 2, 0, split_batches=True)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_a_batch_size_must_be_positive(size):
    class Odd(Undeclared):
        batch_size = size

    with pytest.raises(ValueError, match=rf"Odd.batch_size is {size!r}"):
        BatchSamplerShard(Odd([]), 1, 0)
