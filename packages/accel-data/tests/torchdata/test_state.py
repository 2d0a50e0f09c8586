"""Prepared loaders as torchdata's StatefulDataLoader: what they are, and states from one to the other."""

import copy
import pickle
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel_data import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader, skip_first_batches
from accel_data.loader.shard import SkipDataLoader

stateful = pytest.importorskip("torchdata.stateful_dataloader")
StatefulDataLoader = stateful.StatefulDataLoader
pytestmark = [
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

LENGTH = 23


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(LENGTH))


class StreamWithState(IterableDataset):
    """A stream that continues where its state says, and counts what is read of it."""

    def __init__(self):
        self.start = self.read = 0

    def __iter__(self):
        start, self.start = self.start, 0
        for self.read in range(start + 1, LENGTH + 1):
            yield self.read - 1

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.start = self.read = state["read"]


def generator():
    return torch.Generator().manual_seed(4)


def own_sampler():
    return {"sampler": RandomSampler(range(LENGTH), generator=generator())}


KINDS = {
    "in order": lambda kind, **kwargs: kind(range(LENGTH), 3, **kwargs),
    "drop_last": lambda kind, **kwargs: kind(range(LENGTH), 3, drop_last=True, **kwargs),
    "shuffled": lambda kind, **kwargs: kind(range(LENGTH), 3, shuffle=True, **kwargs),
    "generator": lambda kind, **kwargs: kind(range(LENGTH), 3, shuffle=True, generator=generator(), **kwargs),
    "replacement": lambda kind, **kwargs: kind(
        range(LENGTH),
        3,
        sampler=stateful.sampler.RandomSampler(range(LENGTH), True, 70, generator()),
        **kwargs,
    ),
    "single": lambda kind, **kwargs: kind(torch.arange(24), None, shuffle=True, **kwargs),
    "batches": lambda kind, **kwargs: kind(
        range(LENGTH), batch_sampler=BatchSampler(range(LENGTH), 3, False), **kwargs
    ),
    "stream": lambda kind, **kwargs: kind(Stream(), 3, **kwargs),
    "stream with state": lambda kind, **kwargs: kind(StreamWithState(), 3, **kwargs),
}


def prepared(kind, rank=0, size=1, **kwargs):
    """Make a prepared loader of a plain one, which draws its seed when it is made."""
    torch.manual_seed(1 + kwargs.pop("run", 0))
    loader = KINDS[kind](StatefulDataLoader, **kwargs)
    return prepare_data_loader(loader, num_processes=size, process_index=rank, dispatch_batches=False)


def flat(batches):
    return [index for batch in batches for index in torch.as_tensor(batch).reshape(-1).tolist()]


def read_on(loader, steps):
    """Take some batches; return them, the state there, and the rest of the epoch."""
    batches = iter(loader)
    seen = [next(batches) for _ in range(steps)]
    state = copy.deepcopy(loader.state_dict())
    return flat(seen), state, flat(batches)


@pytest.mark.parametrize("make", [DataLoaderShard, DataLoaderDispatcher, SkipDataLoader])
@pytest.mark.parametrize("data", [range(16), Stream()])
def test_every_loader_is_an_instance(make, data):
    loader = make(data, batch_size=4, use_stateful_dataloader=True, snapshot_every_n_steps=2)
    twins = [loader, skip_first_batches(loader, 1), copy.copy(loader), pickle.loads(pickle.dumps(loader))]

    assert all(isinstance(twin, StatefulDataLoader) and isinstance(twin, make) for twin in twins)
    assert [flat(twin)[:2] for twin in twins] == [[0, 1], [4, 5], [0, 1], [0, 1]]
    assert not isinstance(make(data, batch_size=4), StatefulDataLoader)


@pytest.mark.parametrize("dispatch", [None, True])
def test_what_is_prepared_is_an_instance(dispatch):
    for loader, asked in ((DataLoader, True), (StatefulDataLoader, False)):
        found = prepare_data_loader(
            loader(range(16), 4), use_stateful_dataloader=asked, dispatch_batches=dispatch
        )
        assert isinstance(found, StatefulDataLoader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loader_continues_where_a_prepared_one_was(kind, steps, workers):
    if workers and "stream" in kind:
        workers = 1  # it does not divide itself: two workers would read all of it twice
    _, state, rest = read_on(prepared(kind, num_workers=workers), steps)
    torch.manual_seed(2)
    plain = KINDS[kind](StatefulDataLoader, num_workers=workers)
    plain.load_state_dict(state)

    assert flat(plain) == rest
    assert len(flat(plain)) == len(flat(prepared(kind)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_loader_continues_where_a_plain_one_was(kind, steps, workers):
    if workers and "stream" in kind:
        workers = 1
    torch.manual_seed(1)
    _, state, rest = read_on(KINDS[kind](StatefulDataLoader, num_workers=workers), steps)
    loader = prepared(kind, num_workers=workers, run=1)
    loader.load_state_dict(state)
    again = prepared(kind, num_workers=workers, run=2)

    seen, own, ahead = read_on(loader, 1)
    again.load_state_dict(own)
    assert (seen + ahead, flat(again)) == (rest, ahead)
    assert len(flat(loader)) == len(flat(again)) == len(flat(prepared(kind)))


@given(st.sampled_from(["in order", "shuffled", "generator", "stream"]), st.data())
def test_states_are_exchanged_on_any_number_of_processes(kind, data):
    size, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    loaders = [prepared(kind, rank, size) for rank in range(size)]
    before = [read_on(loader, steps) for loader in loaders]
    plain = KINDS[kind](StatefulDataLoader)
    plain.load_state_dict(before[0][1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = iter(plain)
        taken = flat(next(batches) for _ in range(data.draw(st.integers(0, 1))))
        state = plain.state_dict()
        assert sorted(flat(part for part, _, _ in before) + taken + flat(batches)) == list(range(LENGTH))
    if kind == "stream" and steps:
        return  # torchdata counts batches twice where it has read a stream up to a state
    rest = []
    for rank in range(size):
        loader = prepared(kind, rank, size, run=1)
        loader.load_state_dict(state)
        for batch in loader:
            real = loader.real_samples[rank] if loader.real_samples else None
            rest += batch.tolist()[:real]

    assert sorted(flat(part for part, _, _ in before) + taken + rest) == list(range(LENGTH))


@pytest.mark.parametrize("kind", ["in order", "shuffled", "stream"])
def test_the_end_of_an_epoch_leads_to_the_next_one(kind):
    loader, plain = prepared(kind), KINDS[kind](StatefulDataLoader)
    flat(loader), flat(plain)
    states = loader.state_dict(), plain.state_dict()
    plain.load_state_dict(states[0])
    loader = prepared(kind, run=1)
    loader.load_state_dict(states[1])

    assert sorted(flat(plain)) == sorted(flat(loader)) == list(range(LENGTH))
    assert loader.state_dict()["epoch"] == 2


def test_a_stream_with_a_state_is_not_read_again():
    loader = prepared("stream with state")
    _, state, rest = read_on(loader, 4)
    data = StreamWithState()
    plain = StatefulDataLoader(data, 3)
    plain.load_state_dict(state)
    batches = iter(plain)

    assert next(batches).tolist() == rest[:3]
    assert state["dataset_state"] == {"read": 12}


@pytest.mark.parametrize(("saved", "here"), [("in order", "shuffled"), ("shuffled", "in order")])
def test_loaders_that_are_not_made_equally_reject_a_state(saved, here):
    _, state, _ = read_on(KINDS[saved](StatefulDataLoader), 1)

    with pytest.raises(ValueError, match="both with shuffle=True, or both without"):
        prepared(here).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"_num_yielded": -1},
        {"_num_yielded": None},
        {"_sampler_iter_state": 3},
        {"_sampler_iter_state": {"sampler_iter_state": None}},
        {"_snapshot": {}},
    ],
    ids=str,
)
def test_states_that_are_not_whole_are_rejected(change):
    _, state, _ = read_on(KINDS["in order"](StatefulDataLoader), 1)
    loader = prepared("in order")

    with pytest.raises(ValueError, match=r"StatefulDataLoader is incomplete|impossible number of batches"):
        loader.load_state_dict(state | change)
    assert flat(loader) == list(range(LENGTH))


def handed_out():
    """Exchange states with a loader that process 0 hands out; return what this process reads."""
    plain = StatefulDataLoader(range(LENGTH), 2, shuffle=True, generator=generator())
    _, state, rest = read_on(plain, 3)
    torch.manual_seed(2)
    loader = prepare_data_loader(
        StatefulDataLoader(range(LENGTH), 2, shuffle=True, generator=generator()), dispatch_batches=True
    )
    loader.load_state_dict(state)
    seen, own, _ = read_on(loader, 2)
    plain.load_state_dict(own)
    return seen, flat(plain), rest


def test_states_of_dispatched_loaders_are_exchanged(world):
    results = world.run(handed_out)
    rest = results[0][2]

    assert [seen for seen, _, _ in results] == [rest[0:2] + rest[4:6], rest[2:4] + rest[6:8]]
    assert [after for _, after, _ in results] == [rest[8:]] * 2
