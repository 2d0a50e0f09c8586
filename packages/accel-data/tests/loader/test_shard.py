import gc

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from accel_data import (
    DataLoaderAdapter,
    DataLoaderShard,
    DataLoaderStateMixin,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from accel_state.gradient import GradientState

pytestmark = pytest.mark.usefixtures("fresh_state")


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Unsized:
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Failing:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 6:
            raise OSError("disk")
        return index


def prepare(loader, processes=1, rank=0, **kwargs):
    return prepare_data_loader(
        loader, num_processes=processes, process_index=rank, dispatch_batches=False, **kwargs
    )


@pytest.mark.parametrize(
    "loader",
    [DataLoader(range(10), 4), DataLoader(Stream(10), 4), DataLoader(Unsized(10), 4, sampler=Unsized(10))],
    ids=["sized", "stream", "unsized"],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_the_end_is_known_while_the_last_batch_is_processed(loader, processes):
    if isinstance(loader.dataset, Unsized):
        loader = DataLoader(range(10), 4, sampler=Unsized(10))
    loader = prepare(loader, processes)
    for _ in range(2):
        seen = [(loader.end_of_dataloader, loader.real_samples) for _ in loader]

        assert [end for end, _ in seen] == [False] * (len(seen) - 1) + [True]
        assert [real for _, real in seen[:-1]] == [None] * (len(seen) - 1)
        assert seen[-1][1] == (None if processes == 1 else (2, 0))
        assert loader.end_of_dataloader


def test_remainder():
    assert [loader.remainder for loader in (prepare(DataLoader(range(10), 4), 2),)] == [-1]
    for length, drop_last, remainder in ((10, False, 2), (16, False, 0), (10, True, -1)):
        loader = prepare(DataLoader(range(length), 4, drop_last=drop_last), 2)
        next(iter(loader))
        assert loader.remainder == remainder


def test_the_remainder_of_a_stream_is_known_at_its_end():
    loader = prepare(DataLoader(Stream(10), 4), 2)
    assert [loader.remainder for _ in loader] == [-1, 2]


class CountedReads(Stream):
    def __iter__(self):
        self.read = 0
        for sample in range(self.length):
            self.read += 1
            yield sample


def test_nothing_is_read_ahead_where_the_length_is_known():
    read = []

    class Reads:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            read.append(index)
            return index

    seen = [len(read) for _ in prepare(DataLoader(Reads(), 2))]

    assert seen == [2, 4, 6]


def test_one_batch_is_read_ahead_in_a_stream():
    data = CountedReads(6)

    assert [data.read for _ in prepare(DataLoader(data, 2))] == [4, 6, 6]


def test_the_gradient_state_is_notified():
    state = GradientState()
    outer, inner = prepare(DataLoader(range(4), 2)), prepare(DataLoader(range(2), 1))
    for number, _ in enumerate(outer):
        assert state.active_dataloader is outer
        ends = [(state.active_dataloader is inner, state.end_of_dataloader) for _ in inner]
        assert ends == [(True, False), (True, True)]
        assert state.active_dataloader is outer
        assert state.end_of_dataloader == (number == 1)

    assert not state.in_dataloader


def test_the_gradient_state_is_notified_of_a_break():
    state = GradientState()
    for _ in prepare(DataLoader(range(4), 2)):
        assert state.in_dataloader
        break

    assert not state.in_dataloader


def test_the_gradient_state_is_notified_of_an_error():
    state = GradientState()
    loader = prepare(DataLoader(Failing(), 2))
    with pytest.raises(OSError, match="disk"):
        list(loader)

    assert not state.in_dataloader
    assert loader.state_dict()["consumed"] == 6


def test_an_error_in_the_loop_ends_the_iteration():
    state = GradientState()

    def loop():
        for _ in prepare(DataLoader(range(4), 2)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    gc.collect()

    assert not state.in_dataloader


def test_the_gradient_state_may_be_chosen():
    mine = GradientState.new()
    GradientState.new()
    loader = prepare(DataLoader(range(4), 2), gradient_state=mine)
    for _ in loader:
        assert mine.active_dataloader is loader
        assert not GradientState().in_dataloader
    for _ in skip_first_batches(loader, 1):
        assert mine.in_dataloader


def test_a_loader_can_be_made_directly():
    loader = DataLoaderShard(range(6), batch_size=2, shuffle=True, iteration=3)
    stream = DataLoaderShard(Stream(5), batch_size=2, skip_batches=1)

    assert sorted(torch.cat(list(loader)).tolist()) == list(range(6))
    assert loader.iteration == 4
    assert [batch.tolist() for batch in stream] == [[2, 3], [4]]
    assert (loader.total_batch_size, loader.total_dataset_length, len(loader)) == (2, 6, 3)
    assert isinstance(loader, DataLoaderAdapter)
    assert isinstance(loader, DataLoaderStateMixin)
    assert issubclass(SkipDataLoader, (DataLoaderAdapter, DataLoaderStateMixin))


def test_direct_loaders_use_the_global_generator_like_torch():
    torch.manual_seed(0)
    expected = [batch.tolist() for batch in DataLoader(range(20), 3, shuffle=True)]
    torch.manual_seed(0)

    assert [batch.tolist() for batch in DataLoaderShard(range(20), batch_size=3, shuffle=True)] == expected


def test_the_sampler_can_be_replaced():
    loader = prepare(DataLoader(range(6), 2))
    loader.set_sampler(SequentialSampler(range(2)))

    assert [batch.tolist() for batch in loader] == [[0, 1]]
    with pytest.raises(ValueError, match="no sampler that could be replaced"):
        prepare(DataLoader(Stream(3))).set_sampler(SequentialSampler(range(2)))


def test_adjusting_for_prefetch_changes_nothing():
    loader = prepare(DataLoader(range(6), 2, num_workers=1))
    next(iter(loader))
    before = loader.state_dict()
    loader.adjust_state_dict_for_prefetch()

    assert loader.state_dict() == before


def test_a_copy_that_skips_leaves_the_loader_alone():
    loader = prepare(DataLoader(range(6), batch_sampler=BatchSampler(SequentialSampler(range(6)), 2, False)))
    skipped = skip_first_batches(loader, 2)

    assert (len(skipped), len(loader)) == (1, 3)
    assert skipped.end_of_dataloader is False
    list(skipped)
    assert (skipped.end_of_dataloader, loader.end_of_dataloader) == (True, False)


def test_an_empty_dataset_gives_nothing():
    for loader in (DataLoader([], 2), DataLoader(Stream(0), 2)):
        for processes in (1, 2):
            assert list(prepare(loader, processes)) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_pass_draws_no_second_seed(workers):
    """What the script draws after a resume is what the uninterrupted run draws."""

    def start(seed: int) -> DataLoader:
        torch.manual_seed(seed)
        return prepare_data_loader(
            DataLoader(range(8), batch_size=2, num_workers=workers), num_processes=1, process_index=0
        )

    loader = start(3)
    drawn = []
    for step, _ in enumerate(loader):
        if step == 1:
            state, rng = loader.state_dict(), torch.get_rng_state()
        drawn.append(torch.rand(1).item())

    resumed = start(4)
    resumed.load_state_dict(state)
    torch.set_rng_state(rng)
    again = [torch.rand(1).item()]
    again += [torch.rand(1).item() for _ in resumed]

    assert again == drawn[1:]
