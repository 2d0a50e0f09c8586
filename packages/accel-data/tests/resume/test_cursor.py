import io
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from accel_data import prepare_data_loader, skip_first_batches
from accel_data.order.mixing import mix_seed
from accel_data.resume.cursor import Cursor, Progress

pytestmark = pytest.mark.usefixtures("fresh_state")


class Recorded:
    def __init__(self, length):
        self.length = length
        self.read = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


KINDS = {
    "sequential": lambda data: {},
    "shuffle": lambda data: {"shuffle": True},
    "generator": lambda data: {"shuffle": True, "generator": torch.Generator().manual_seed(4)},
    "weighted": lambda data: {"sampler": WeightedRandomSampler(torch.ones(len(data)), len(data))},
    "replacement": lambda data: {"sampler": RandomSampler(data, replacement=True)},
}


def loaders(dataset, processes, batch_size=2, workers=0, kind="sequential", split=False, even=True, **kwargs):
    """Make the loaders of all processes, each with its own generators."""
    return [
        prepare_data_loader(
            DataLoader(dataset, batch_size, num_workers=workers, **KINDS[kind](dataset), **kwargs),
            num_processes=processes,
            process_index=rank,
            data_seed=5,
            dispatch_batches=False,
            split_batches=split,
            even_batches=even,
        )
        for rank in range(processes)
    ]


def real_samples(iterators, loaders, steps=None):
    """Read some steps, or all, of all processes in turn; return the samples that are no padding."""
    samples = []
    while steps is None or steps > 0:
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            return samples
        for rank, (loader, batch) in enumerate(zip(loaders, batches, strict=True)):
            if batch is None:  # even_batches=False
                continue
            samples += batch.tolist()[: loader.real_samples[rank] if loader.real_samples else None]
        steps = None if steps is None else steps - 1
    return samples


def whole_epoch(some):
    return real_samples([iter(loader) for loader in some], some)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@given(
    length=st.integers(1, 50),
    batch_size=st.integers(1, 4),
    processes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    stops=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    epoch=st.integers(0, 2),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_a_run_continues_with_any_number_of_processes(length, batch_size, processes, stops, epoch, kind):
    def make(count):
        return loaders(range(length), count, batch_size, kind=kind)

    uninterrupted = make(1)
    order = [sample for _ in range(epoch + 4) for sample in whole_epoch(uninterrupted)]

    some = make(processes[0])
    for _ in range(epoch):
        whole_epoch(some)
    seen = order[: epoch * length]
    for stop, following in zip(stops, processes[1:], strict=True):
        left = length - len(seen) % length
        stop = min(stop, -(-left // (batch_size * len(some))))  # not beyond the epoch's end
        seen += real_samples([iter(loader) for loader in some], some, stop)
        states = [through_a_file(loader.state_dict()) for loader in some]
        assert all(state["consumed"] == states[0]["consumed"] for state in states)
        some = make(following)
        for loader in some:
            loader.load_state_dict(states[0])
    seen += whole_epoch(some)
    seen += whole_epoch(some)

    assert seen == order[: len(seen)]
    assert len(seen) % length == 0


@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 4),
    processes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    stop=st.integers(0, 6),
    split=st.booleans(),
    even=st.booleans(),
    drop_last=st.booleans(),
)
def test_a_run_continues_however_it_is_sharded(length, batch_size, processes, stop, split, even, drop_last):
    batch_size *= processes[0] * processes[1] if split else 1
    options = {"kind": "shuffle", "split": split, "even": even, "drop_last": drop_last}

    def make(count):
        data = Recorded(length)
        return loaders(data, count, batch_size, **options), data

    orders = loaders(range(length), 1, 1, kind="shuffle")
    orders = [whole_epoch(orders), whole_epoch(orders)]
    some, _ = make(processes[0])
    seen = real_samples([iter(loader) for loader in some], some, min(stop, len(some[0])))
    states = [loader.state_dict() for loader in some]
    assert len({state["consumed"] for state in states if state["batches"] == states[0]["batches"]}) == 1
    some, data = make(processes[1])
    for loader in some:
        loader.load_state_dict(states[0])
    left = length - states[0]["consumed"]
    nothing = seen and not states[0]["ended"] and drop_last and left < some[0].total_batch_size
    with pytest.warns(match="Nothing is left of epoch 0") if nothing else nullcontext():
        rest = real_samples([iter(loader) for loader in some], some)

    order = orders[states[0]["ended"]]
    begin = 0 if states[0]["ended"] else len(seen)
    assert seen == orders[0][: len(seen)]
    assert rest == order[begin : begin + len(rest)]
    assert set(data.read) <= {*rest, *order[: some[0].total_batch_size]}  # the latter for padding
    left = length - begin
    assert len(rest) == left - (left % some[0].total_batch_size if drop_last else 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_have_read_ahead_is_not_counted(workers):
    (loader,) = loaders(range(30), 1, workers=workers, kind="shuffle")
    order = whole_epoch([loader])
    iterator = iter(loader)
    first = real_samples([iterator], [loader], 3)
    state = loader.state_dict()
    del iterator
    (again,) = loaders(range(30), 1, workers=workers, kind="shuffle")
    again.load_state_dict(state)

    assert state["consumed"] == 6
    assert first + whole_epoch([again]) != order
    assert sorted(first + whole_epoch([again])) != sorted(first)


def test_skipped_samples_are_not_read():
    data = Recorded(40)
    (loader,) = loaders(data, 1, kind="shuffle")
    iterator = iter(loader)
    real_samples([iterator], [loader], 15)
    state = loader.state_dict()
    data.read.clear()
    (again,) = loaders(data, 1, kind="shuffle")
    again.load_state_dict(state)
    rest = whole_epoch([again])

    assert data.read == rest
    assert len(rest) == 10


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("processes", [1, 3])
def test_a_stream_continues(workers, processes):
    (loader,) = loaders(Stream(23), 1, workers=workers)
    seen = real_samples([iter(loader)], [loader], 4)
    some = loaders(Stream(23), processes, workers=workers)
    for again in some:
        again.load_state_dict(loader.state_dict())

    assert seen + whole_epoch(some) == list(range(23))
    assert whole_epoch(some) == list(range(23))


def test_workers_that_live_on_start_the_next_epoch_at_its_beginning():
    (loader,) = loaders(Stream(9), 1, workers=2, persistent_workers=True)
    loader.load_state_dict({**loader.state_dict(), "consumed": 4, "batches": 2})

    assert whole_epoch([loader]) == list(range(4, 9))
    assert whole_epoch([loader]) == list(range(9))
    loader._reader = None  # end the workers


@pytest.mark.parametrize("processes", [2, 4])
def test_skipping_after_loading_means_the_first_batches_of_the_epoch(processes):
    some = loaders(range(50), 2, kind="shuffle")
    order = whole_epoch(loaders(range(50), 1, kind="shuffle"))
    real_samples([iter(loader) for loader in some], some, 3)
    state = some[0].state_dict()
    for skip in (0, 3, 5, 1):
        again = loaders(range(50), processes, kind="shuffle")
        for loader in again:
            loader.load_state_dict(state)
        skipped = [skip_first_batches(loader, skip) for loader in again]

        assert whole_epoch(skipped) == order[(skip or 3) * 4 :]  # batches of the run that was saved
        assert whole_epoch(again) == whole_epoch(loaders_at(1))


@given(
    length=st.integers(1, 60),
    processes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    stop=st.integers(1, 6),
    kind=st.sampled_from(["shuffle", "stream"]),
)
def test_the_loaded_place_has_a_number_in_both_units_of_batches(length, processes, stop, kind):
    def make(count):
        if kind == "stream":
            return loaders(Stream(length), count)
        return loaders(range(length), count, kind=kind)

    before, after = processes
    some = make(before)
    real_samples([iter(loader) for loader in some], some, stop)
    state = some[0].state_dict()
    if state["ended"] or state["batches"] < stop:
        return
    again = make(after)
    for loader in again:
        loader.load_state_dict(state)
    rest = whole_epoch(again)
    numbers = [stop] + ([stop * before // after] if stop * before % after == 0 else [])
    for number in numbers:
        again = make(after)
        for loader in again:
            loader.load_state_dict(state)

        assert whole_epoch([skip_first_batches(loader, number) for loader in again]) == rest


def loaders_at(epoch):
    some = loaders(range(50), 1, kind="shuffle")
    some[0].set_epoch(epoch)
    return some


@pytest.mark.parametrize("sampler", [None, WeightedRandomSampler(torch.ones(20), 20)])
def test_a_state_brings_its_seed(sampler):
    def make(seed):
        loader = DataLoader(range(20), 2, shuffle=sampler is None, sampler=sampler)
        return prepare_data_loader(loader, num_processes=1, process_index=0, data_seed=seed)

    saved, other = make(1), make(2)
    orders = [whole_epoch([saved]) for _ in range(2)]
    assert whole_epoch([other]) != orders[0]
    other.load_state_dict({**saved.state_dict(), "epoch": 0})

    assert [whole_epoch([other]) for _ in range(2)] == orders


def test_skipping_after_loading_counts_from_the_beginning():
    (loader,) = loaders(range(20), 1)
    loader.load_state_dict({**loader.state_dict(), "consumed": 6, "batches": 3})

    assert whole_epoch([skip_first_batches(loader, 5)]) == list(range(10, 20))


def test_set_epoch_keeps_the_place_in_that_epoch():
    (loader,) = loaders(range(20), 1)
    state = {**loader.state_dict(), "epoch": 2, "consumed": 6, "batches": 3}
    loader.load_state_dict(state)
    loader.set_epoch(2)
    assert whole_epoch([loader]) == list(range(6, 20))
    loader.load_state_dict(state)
    loader.set_epoch(3)
    assert whole_epoch([loader]) == list(range(20))


def test_a_pass_left_early_is_the_place_until_the_next():
    (loader,) = loaders(range(20), 1, kind="shuffle")
    for number, _ in enumerate(loader):
        if number == 2:
            break
    state = loader.state_dict()

    assert (state["epoch"], state["consumed"], state["batches"]) == (0, 6, 3)
    assert loader.iteration == 1
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (1, 2)


def test_the_state_of_a_loader_that_has_not_begun_is_its_loaded_place():
    (loader,) = loaders(range(20), 1, kind="shuffle")
    state = {**loader.state_dict(), "consumed": 6, "batches": 3}
    loader.load_state_dict(state)

    assert loader.state_dict() == state


def test_iterations_side_by_side_are_epochs_of_their_own():
    (loader,) = loaders(range(20), 1, kind="shuffle")
    pairs = list(zip(loader, loader, strict=True))

    assert torch.cat([one for one, _ in pairs]).tolist() != torch.cat([other for _, other in pairs]).tolist()
    assert loader.iteration == 2


def test_whole_batches_of_unknown_size_are_counted():
    def make():
        loader = DataLoader(range(9), batch_sampler=[[0], [1, 2], [3, 4, 5], [6, 7], [8]])
        return prepare_data_loader(loader, num_processes=1, process_index=0)

    loader = make()
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    again = make()
    again.load_state_dict(state)

    assert state["consumed"] == 2
    assert [batch.tolist() for batch in again] == [[3, 4, 5], [6, 7], [8]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 21}, "over 21 samples, but this dataset has 20"),
        ({"seed": None}, "that of an unshuffled loader, but this is a shuffled one"),
        ({"version": 9}, "Loader state of version 9"),
        ({"consumed": 21}, "consumed=21: an epoch of this loader has 20 samples"),
        ({"consumed": -1}, "consumed=-1: it must be an integer of at least 0"),
        ({"epoch": 1.5}, "epoch=1.5"),
        ({"step_size": 0}, "step_size=0: it must be an integer of at least 1"),
        ({"batches": True}, "batches=True"),
        ({"ended": 1}, "ended=1: it must be True or False"),
    ],
)
def test_impossible_states_are_rejected(change, message):
    (loader,) = loaders(range(20), 1, kind="shuffle")
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})


@pytest.mark.parametrize("state", [{"_iterator_finished": True}, {}, None, [1]])
def test_foreign_states_are_rejected(state):
    (loader,) = loaders(range(20), 1)
    with pytest.raises(ValueError, match="not the state of a prepared loader"):
        loader.load_state_dict(state)


def test_a_shuffled_place_is_rejected_by_a_loader_in_order():
    (shuffled,), (in_order,) = loaders(range(20), 1, kind="shuffle"), loaders(range(20), 1)
    with pytest.raises(ValueError, match="that of a shuffled loader, but this is an unshuffled one"):
        in_order.load_state_dict(shuffled.state_dict())


def test_batches_beyond_a_cursor_are_counted_as_the_run_did():
    cursor = Cursor(epoch=0, consumed=20, batches=5, step_size=4)

    assert [cursor.after(count, 4) for count in (5, 6, 4, 0, 7)] == [20, 24, 16, 0, 28]
    assert [cursor.after(count, 10) for count in (2, 5, 3)] == [20, 20, 12]
    assert Cursor(consumed=3, batches=5, step_size=4).after(0, 4) == 0


def test_an_epoch_begins_once():
    progress = Progress()
    first = progress.start(0, False, 4, 10)
    first.steps = 3
    progress.finish(first, exhausted=True)
    progress.finish(first, exhausted=True)

    assert progress.epoch == 1
    assert first.cursor(None).consumed == 10


def test_a_state_of_before_epochs_were_drawn_from_seed_plus_epoch_continues_in_its_order():
    loader = loaders(range(12), 1, 4, kind="shuffle")[0]
    batches = iter(loader)
    next(batches)
    state = {name: value for name, value in loader.state_dict().items() if name != "keyed"}
    resumed = loaders(range(12), 1, 4, kind="shuffle")[0]
    resumed.load_state_dict(state)
    before = torch.randperm(12, generator=torch.Generator().manual_seed(mix_seed(5, 0)))

    assert torch.cat(list(resumed)).tolist() == before[4:].tolist()
    list(batches)
    assert torch.cat(list(resumed)).tolist() == torch.cat(list(loader)).tolist()  # the next epoch
