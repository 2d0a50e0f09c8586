from itertools import cycle, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data import IterableDatasetShard
from accel_data.resume.stream_position import StreamPosition
from accel_data.stream.dataset import Block, CollateBlock, count_rows
from accel_data.stream.reader import open_stream


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.length))


class Divided(Stream):
    """A dataset that divides itself over the workers, as the manual of torch shows it."""

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(worker, self.length, workers))


class Curious(Stream):
    """A dataset that looks at its worker, but does not divide itself."""

    def __iter__(self):
        info = get_worker_info()
        assert info is None or info.id in (0, 1)
        return iter(range(self.length))


def chunks(entries, size):
    return [entries[i : i + size] for i in range(0, len(entries), size)]


def documented(length, size, processes, split, drop_last, even):
    """Return the samples of each process, as the documentation says it."""
    share = size // processes if split else size
    shards = [[] for _ in range(processes)]
    for step in chunks(list(range(length)), share * processes):
        missing = share * processes - len(step)
        if missing and drop_last:
            break
        if missing and even:
            step += list(islice(cycle(range(length)), missing))
        for shard, part in zip(shards, chunks(step, share), strict=False):
            shard += part
    return shards


cases = st.tuples(
    st.integers(0, 60), st.integers(1, 5), st.integers(1, 8), st.booleans(), st.booleans(), st.booleans()
)


@given(cases)
def test_shards_are_as_documented(case):
    length, size, processes, split, drop_last, even = case
    size *= processes if split else 1
    expected = documented(length, size, processes, split, drop_last, even)
    for rank in range(processes):
        shard = IterableDatasetShard(
            Stream(length), size, drop_last, processes, rank, split, even_batches=even
        )

        assert list(shard) == expected[rank]
        assert len(shard) == len(expected[rank])
        assert all(block.samples for block in shard.blocks())  # a process without samples gets no batch


def test_documented_examples():
    def shard(rank, split):
        return list(IterableDatasetShard(Stream(8), 4, False, 2, rank, split))

    assert [shard(0, False), shard(1, False)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [shard(0, True), shard(1, True)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


@given(cases, st.integers(0, 60))
def test_a_pass_starts_at_any_sample(case, start):
    length, size, processes, split, drop_last, even = case
    size *= processes if split else 1
    seen = []
    for rank in range(processes):
        shard = IterableDatasetShard(
            Stream(length), size, drop_last, processes, rank, split, even_batches=even
        )
        blocks = list(shard.blocks(start))
        group = shard.per_rank_batch * processes
        for number, block in enumerate(blocks):
            samples = block.samples[: block.step_rows.real[rank] if block.step_rows else None]
            seen += [
                (start + number * group + rank * shard.per_rank_batch + i, s) for i, s in enumerate(samples)
            ]
            assert block.step_rows is None or number == len(blocks) - 1

    left = max(length - start, 0)
    assert sorted(seen) == [
        (i, i) for i in range(start, start + (left - left % group if drop_last else left))
    ]


@pytest.mark.parametrize("kind", [Stream, Divided, Curious])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("length", [0, 1, 23, 24])
def test_with_workers_each_sample_appears_once(kind, processes, length):
    seen = []
    for rank in range(processes):
        shard = IterableDatasetShard(kind(length), 4, num_processes=processes, process_index=rank)
        seen += [
            sample
            for block in read_blocks(shard)
            for sample in block.samples[: block.step_rows.real[rank] if block.step_rows else 4]
        ]

    assert sorted(seen) == list(range(length))


def read_blocks(shard):
    class Reader(IterableDataset):
        def __iter__(self):
            return shard.blocks()

    return DataLoader(Reader(), batch_size=None, num_workers=2, collate_fn=lambda block: block)


def test_workers_take_turns_so_that_the_order_stays():
    shard = IterableDatasetShard(Stream(23), 4, num_processes=2, process_index=1)
    loader = DataLoader(shard, 4, num_workers=2)

    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 0]]


def test_a_divided_stream_continues_where_its_workers_were():
    shard = IterableDatasetShard(Divided(40), 4)

    class Reader(IterableDataset):
        def __init__(self, start):
            self.start = start

        def __iter__(self):
            return shard.blocks(self.start)

    def read(start):
        loader = DataLoader(
            Reader(start), batch_size=None, num_workers=2, collate_fn=lambda block: block.samples
        )
        return list(loader)

    assert read(12) == [[], [], [], *read(0)[3:]]


def test_a_shard_in_a_shard_is_divided_once():
    inner = IterableDatasetShard(Stream(20), 2, num_processes=2, process_index=1)
    samples = [
        s for block in read_blocks(IterableDatasetShard(inner, 5, even_batches=False)) for s in block.samples
    ]

    assert sorted(samples) == list(inner)


def test_the_worker_is_itself_again_after_the_first_sample():
    class Reader(IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            open_stream(Stream(3))
            assert get_worker_info() is info
            yield 1

    assert len(list(DataLoader(Reader(), batch_size=None, num_workers=1))) == 1


def test_whole_batches_are_counted_by_rows():
    shard = IterableDatasetShard(list(torch.arange(10).split(2)), 1, num_processes=2, process_index=1)

    assert [block.step_rows for block in shard.blocks(counts_rows=True)] == [None, None, ((2, 0), (2, 2))]
    assert [count_rows(item) for item in (torch.ones(3, 4), torch.tensor(1.0), "text")] == [3, 1, 1]


def test_blocks_are_collated():
    place = StreamPosition(2, 2)
    block = Block([torch.tensor(1), torch.tensor(2)], (1, 1), place)

    assert CollateBlock(torch.stack, batched=True)(block)[1].tolist() == [1, 2]
    assert CollateBlock(lambda item: item + 1, batched=False)(block) == ((1, 1), torch.tensor(2), place)
    assert CollateBlock(torch.stack, batched=True)(block._replace(samples=[])) == ((1, 1), None, place)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a positive integer, but it is 0"),
        ({"batch_size": 2.0}, "batch_size must be a positive integer, but it is 2.0"),
        ({"batch_size": 3, "num_processes": 2, "split_batches": True}, "3 does not divide by 2"),
        ({"num_processes": 2, "process_index": 2}, "below num_processes=2, but it is 2"),
    ],
)
def test_bad_input_is_rejected(kwargs, message):
    with pytest.raises(ValueError, match=message):
        IterableDatasetShard(Stream(3), **kwargs)
