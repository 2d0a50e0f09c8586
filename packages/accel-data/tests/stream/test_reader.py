"""Streams that are left at any batch and gone on with: by the dataset's own state, or by reading past."""

import copy
import pickle
from contextlib import contextmanager
from functools import cache
from itertools import chain, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from accel_data import IterableDatasetShard, prepare_data_loader, skip_first_batches
from accel_data.resume.stream_position import BlockPosition, PositionHistory, ShardPosition, StreamPosition
from accel_data.stream.reader import Source, read

pytestmark = pytest.mark.usefixtures("fresh_state")


class Plain(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Stateful(Plain):
    """A stream that can go to any place of its own, and notes what is read of it."""

    def __init__(self, length):
        super().__init__(length)
        self.next = 0
        self.read = []

    def mine(self):
        return range(self.length)

    def __iter__(self):
        while self.next < len(self.mine()):
            self.next += 1
            self.read.append(self.mine()[self.next - 1])
            yield self.mine()[self.next - 1]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Divided(Plain):
    """A stream that gives each worker its own samples, the first one more than the others."""

    def mine(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return [i for i in range(self.length) if max(i % (workers + 1) - 1, 0) == worker]

    def __iter__(self):
        return iter(self.mine())


class DividedStateful(Stateful):
    def __iter__(self):
        mine = Divided.mine(self)
        while self.next < len(mine):
            self.next += 1
            yield mine[self.next - 1]
        self.next = 0


KINDS = {kind.__name__: kind for kind in (Plain, Stateful, Divided, DividedStateful)}


@contextmanager
def as_worker(worker, workers):
    """Be a worker of a loader, as get_worker_info tells it."""
    torch_worker._worker_info = (
        torch_worker.WorkerInfo(id=worker, num_workers=workers, seed=0, dataset=None) if workers else None
    )
    try:
        yield
    finally:
        torch_worker._worker_info = None


def blocks(shard, workers, start=0, place=None):
    """Read as a loader with workers does: each has a copy of the dataset, and they take turns."""
    active = {w: copy.deepcopy(shard).blocks(start, place) for w in range(max(workers, 1))}
    while active:
        for worker, iterator in list(active.items()):
            with as_worker(worker, workers):
                block = next(iterator, None)
            if block is None:
                del active[worker]
            else:
                yield block


def flat(lists):
    return list(chain.from_iterable(lists))


def samples_of(found, rank):
    return found.samples[: found.step_rows.real[rank] if found.step_rows else None]


@given(
    kind=st.sampled_from(sorted(KINDS)),
    length=st.integers(1, 60),
    batch_size=st.integers(1, 4),
    processes=st.tuples(*[st.integers(1, 8)] * 3),
    workers=st.tuples(*[st.integers(0, 3)] * 3),
    stops=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_a_stream_continues_on_other_processes_and_workers(
    kind, length, batch_size, processes, workers, stops
):
    """Stop twice; the order is that of the workers which began the epoch."""

    def shards(count):
        return [
            IterableDatasetShard(KINDS[kind](length), batch_size, False, count, rank) for rank in range(count)
        ]

    def whole(start=0, place=None, count=processes[0], of=workers[0]):
        seen = [
            [samples_of(found, rank) for found in blocks(shard, of, start, place)]
            for rank, shard in enumerate(shards(count))
        ]
        return [sample for step in zip(*seen, strict=True) for batch in step for sample in batch]

    expected, seen, place = whole(), [], None
    for stop, count, of in zip(stops, processes, workers, strict=False):
        marks = []
        steps = [[] for _ in range(stop)]
        for rank, shard in enumerate(shards(count)):
            history = PositionHistory(place, 1)
            reads = list(islice(blocks(shard, of, 0, place), stop))
            for number, found in enumerate(reads):
                history.add(found.position, 0)
                steps[number] += samples_of(found, rank)
            marks.append(history.position_after(len(reads)))
        seen += [sample for step in steps for sample in step]
        assert all(mark == marks[0] for mark in marks)
        place = marks[0] and StreamPosition.from_state(marks[0].to_state())

    assert seen + whole(0, place, processes[2], workers[2]) == expected


@given(
    kind=st.sampled_from(sorted(KINDS)),
    length=st.integers(1, 60),
    workers=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    stop=st.integers(1, 5),
    distance=st.integers(-5, 5),
)
def test_another_place_is_found_from_a_place(kind, length, workers, stop, distance):
    shard = IterableDatasetShard(KINDS[kind](length), 2)
    order = [samples_of(found, 0) for found in blocks(shard, workers[0])]
    reads = list(islice(blocks(shard, workers[0]), stop))
    history = PositionHistory(None, 1)
    for found in reads:
        history.add(found.position, 0)
    steps = max(len(reads) + distance, 0)
    place = history.position_after(len(reads)).moved((steps - len(reads)) * 2, steps * 2)
    rest = [samples_of(found, 0) for found in blocks(shard, workers[1], 0, place)]

    assert flat(rest) == flat(order[steps:])


@pytest.mark.parametrize("kind", [Stateful, DividedStateful])
def test_skipped_samples_are_not_read_where_the_dataset_has_a_state(kind):
    place = StreamPosition(2, 2, parts=(ShardPosition(30, pickle.dumps({"next": 30})),))
    data = kind(40)
    shard = IterableDatasetShard(data, 2, even_batches=False)
    rest = [sample for found in shard.blocks(0, place) for sample in found.samples]

    assert rest == list(range(30, 40))
    if kind is Stateful:
        assert data.read == rest


def prepared(data, workers=0, processes=1, rank=0, **kwargs):
    loader = DataLoader(data, 2, num_workers=workers, **kwargs)
    return prepare_data_loader(
        loader, num_processes=processes, process_index=rank, dispatch_batches=kwargs.get("dispatch", False)
    )


def batches(loader):
    return [batch.tolist() for batch in loader]


def on_one_process(kind, workers, dispatch):
    loader = DataLoader(KINDS[kind](23), 2, num_workers=workers)
    return prepare_data_loader(loader, num_processes=1, process_index=0, dispatch_batches=dispatch)


@cache  # a pass with workers starts processes, and each order is compared in several tests
def whole_order(kind, workers, dispatch):
    return batches(on_one_process(kind, workers, dispatch))


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("workers", "other"), [(0, 0), (0, 2), (2, 2), (2, 0), (2, 1)])
def test_a_loader_continues_with_other_workers(kind, workers, other, dispatch):
    order = whole_order(kind, workers, dispatch)
    loader = on_one_process(kind, workers, dispatch)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 5:
            break
    again = on_one_process(kind, other, dispatch)
    again.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))

    rest = batches(again)
    assert flat(seen + rest) == flat(order)
    assert flat(batches(again)) == flat(whole_order(kind, other, dispatch))  # the next epoch is complete
    assert batches(loader) == order


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_after_loading_is_loading(kind, workers):
    loader = prepared(KINDS[kind](40), workers)
    order = batches(loader)
    loader.set_epoch(0)
    for number, _ in enumerate(loader, 1):
        if number == 7:
            break
    state = loader.state_dict()
    for skip in (0, 7, 9, 3):
        data = KINDS[kind](40)
        again = prepared(data, workers)
        again.load_state_dict(state)

        assert flat(batches(skip_first_batches(again, skip))) == flat(order[skip or 7 :])
        if kind == "Stateful" and not workers:
            assert data.read == list(range(0 if skip == 3 else 14, 40))  # from the state on, where it helps


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("skip", [1, 8, 12])
def test_skipping_a_stream_that_workers_divide(kind, skip):
    loader = prepared(KINDS[kind](40), 2)
    order = batches(loader)
    loader.set_epoch(0)

    assert batches(skip_first_batches(loader, skip)) == order[skip:]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_place_in_what_was_skipped_is_known(kind):
    loader = prepared(KINDS[kind](40), 2)
    order = batches(loader)
    loader.set_epoch(0)
    iterator = iter(skip_first_batches(loader, 5))
    next(iterator)
    again = prepared(KINDS[kind](40), 2)
    again.load_state_dict(loader.state_dict())
    del iterator

    assert batches(again) == order[6:]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_after_one_that_was_left_early_is_whole(workers):
    loader = prepared(Stateful(20), workers)
    order = batches(loader)
    for _ in loader:
        break

    assert batches(loader) == order


def test_workers_that_live_on_begin_the_next_epoch_at_its_start():
    loader = prepared(Stateful(9), 2, persistent_workers=True)
    next(iter(loader))
    again = prepared(Stateful(9), 2, persistent_workers=True)
    again.load_state_dict(loader.state_dict())

    assert batches(again) == [[2, 3], [4, 5], [6, 7], [8]]
    assert batches(again) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    again._reader = loader._reader = None  # end the workers


def test_padding_after_a_resume_is_that_of_the_uninterrupted_run():
    def last_batches(start):
        loaders = [prepared(Stateful(13), processes=2, rank=rank) for rank in range(2)]
        if start:
            iterator = iter(prepared(Stateful(13), processes=2))
            source = prepared(Stateful(13), processes=2)
            iterator = iter(source)
            next(iterator), next(iterator)
            for loader in loaders:
                loader.load_state_dict(source.state_dict())
        return [batches(loader)[-1] for loader in loaders]

    assert last_batches(0) == last_batches(2) == [[12, 0], [1, 2]]


def test_a_state_that_changes_while_it_is_read_is_copied():
    class Live(Stateful):
        def __init__(self, length):
            super().__init__(length)
            self.live = {"next": 0}

        def state_dict(self):
            self.live["next"] = self.next
            return self.live

    source = Source(Live(9))
    reading = read(source, 2, 0, None, False)
    reading.take(2)
    position = reading.position()
    reading.take(9)

    assert position == StreamPosition(2, 2, parts=(ShardPosition(2, pickle.dumps({"next": 2})),))


def test_marks_of_workers_make_a_place():
    history = PositionHistory(None, per_step=1)
    for number in range(5):
        history.add(BlockPosition(number % 2, 2, 3, ShardPosition(3 * (number // 2 + 1))), steps=0)

    assert history.position_after(0) is None
    assert history.position_after(1) == StreamPosition(
        3, 3, 1, (ShardPosition(3), ShardPosition(0)), num_workers=2
    )
    assert history.position_after(3) == StreamPosition(
        3, 3, 1, (ShardPosition(6), ShardPosition(3)), num_workers=2
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "impossible stream"),
        ({"turn": 1}, "`turn` below the number of parts"),
        ({"left": 9}, "`left` at most `chunk`"),
        ({"ahead": -1}, "integers from 0 on"),
        ({"num_workers": 2}, "one part per worker"),
        ({"parts": [{"read": 1.5, "state": None, "ended": False}]}, "integers from 0 on"),
        ({"parts": [{"read": 1}]}, "lacks 'state'"),
        ({"parts": None}, "impossible stream"),
    ],
)
def test_impossible_places_are_rejected(change, message):
    loader = prepared(Stateful(9))
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**state, "stream": {**state["stream"], **change}})
