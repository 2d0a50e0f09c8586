"""A state that was saved while the last batch of an epoch was at hand: the next epoch comes next."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from accel_data import prepare_data_loader, skip_first_batches
from accel_state.process.state import current_process

pytestmark = pytest.mark.usefixtures("fresh_state")

LENGTH = 9  # on 1 and on 2 processes the last step is not full


class Stream(IterableDataset):
    """A stream with another order in each epoch, which tells its length only if asked to."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(index + self.epoch) % LENGTH for index in range(LENGTH)])


class Stateful(Stream):
    next = 0

    def __iter__(self):
        while self.next < LENGTH:
            self.next += 1
            yield (self.next - 1 + self.epoch) % LENGTH
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def shuffled(**options):
    return DataLoader(range(LENGTH), 2, shuffle=True, **options)


def from_generator(**options):
    generator = torch.Generator().manual_seed(4)
    return DataLoader(range(LENGTH), 2, shuffle=True, generator=generator, **options)


class Reversed:
    """A sampler without a length."""

    def __iter__(self):
        return iter(range(LENGTH - 1, -1, -1))


def without_length(**options):
    return DataLoader(range(LENGTH), 2, sampler=Reversed(), **options)


def stream(**options):
    return DataLoader(Stream(), 2, **options)


def stateful(**options):
    return DataLoader(Stateful(), 2, **options)


KINDS = (shuffled, from_generator, without_length, stream, stateful)
CASES = [(kind, dispatch, 0) for kind in KINDS for dispatch in (False, True)]
CASES += [(kind, dispatch, 2) for kind in (shuffled, stream) for dispatch in (False, True)]


def make(case):
    kind, dispatch, workers = case
    return prepare_data_loader(kind(num_workers=workers), dispatch_batches=dispatch, data_seed=7)


def seen(loader):
    """Return what is drawn and read in one pass, of all processes together."""
    own = [batch.tolist() for batch in loader]
    everyone = [None] * current_process().world_size
    dist.all_gather_object(everyone, own)
    return everyone, torch.rand(()).item()


def uninterrupted(case):
    """Return three epochs, and the states of the loader and of torch at the last batch of the first one."""
    torch.manual_seed(3)
    loader = make(case)
    first = []
    for batch in loader:
        first.append(batch.tolist())
        if loader.end_of_dataloader:
            state, drawn = loader.state_dict(), torch.get_rng_state()
    return state, drawn, len(first), [seen(loader) for _ in range(2)]


def resumed(case, state, drawn, change):
    loader = make(case)
    loader.load_state_dict(state)
    torch.set_rng_state(drawn)
    return loader.iteration, [seen(change(loader)), seen(loader)]


def goes_on(case):
    state, drawn, count, epochs = uninterrupted(case)
    changes = {
        "load alone": lambda loader: loader,
        "skip nothing": lambda loader: skip_first_batches(loader, 0),
        "skip what was seen": lambda loader: skip_first_batches(loader, count),
    }
    if case[2]:  # forking workers takes time: with them, the way that scripts take
        changes = {"skip what was seen": changes["skip what was seen"]}
    for name, change in changes.items():
        iteration, found = resumed(case, state, drawn, change)
        assert iteration == 1, (case, name)
        assert found == epochs, (case, name)
    return state


def all_go_on():
    return [goes_on(case) for case in CASES]


def all_go_on_elsewhere(states):
    """Go on on another number of processes; return the samples of the next two epochs."""
    found = []
    for case, state in zip(CASES, states, strict=True):
        loader = make(case)
        loader.load_state_dict(state)
        known = case[0] is shuffled  # else a script can only know how many the run had that was stopped
        first, _ = seen(skip_first_batches(loader, len(loader) if known else state["batches"]))
        found.append([{index for own in first for batch in own for index in batch}, loader.iteration])
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_the_next_epoch_comes_next(world, size):
    states = world.run(all_go_on, size=size, timeout_s=100)[0]
    other = 3 - size
    for samples, iteration in world.run(all_go_on_elsewhere, states, size=other)[0]:
        assert samples == set(range(LENGTH))
        assert iteration == 2


def batches(loader):
    return [batch.tolist() for batch in loader]


def alone(rank=0, size=1, state=None, **options):
    even = options.pop("even_batches", True)
    loader = DataLoader(range(LENGTH), 2, shuffle=True, **options)
    place = {"num_processes": size, "process_index": rank, "even_batches": even}
    loader = prepare_data_loader(loader, **place, data_seed=7)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def state_at(step, **options):
    loader = alone(**options)
    for number, _ in enumerate(loader, 1):
        if number == step:
            return loader.state_dict()
    raise AssertionError(f"the loader has only {number} batches")


def test_the_epoch_that_has_ended_may_be_named():
    whole = alone()
    _, second, third = batches(whole), batches(whole), batches(whole)
    named = alone(state=state_at(5))
    named.set_epoch(1)
    assert batches(named) == second

    ended = alone(state=state_at(5))
    ended.set_epoch(0)
    assert ended.state_dict()["consumed"] == LENGTH
    with pytest.warns(match=r"Nothing is left of epoch 0 after its first 5 batches \(9 samples"):
        assert batches(ended) == []
    assert [batches(ended), batches(ended)] == [second, third]


def test_a_place_left_by_a_break_at_the_last_batch_is_the_end():
    loader = alone()
    for _ in loader:
        if loader.end_of_dataloader:
            break
    state = loader.state_dict()

    assert (state["epoch"], state["consumed"], state["ended"]) == (0, LENGTH, True)
    assert alone(state=state).state_dict() == state


def test_skipping_what_is_left_is_reported():
    loader = alone(state=state_at(3))
    with pytest.warns(match="Nothing is left of epoch 0 after its first 5 batches"):
        assert batches(skip_first_batches(loader, 5)) == []
    assert loader.iteration == 1


def test_skipping_some_of_the_next_epoch():
    whole = alone()
    batches(whole)
    loader = skip_first_batches(alone(state=state_at(5)), 2)

    assert batches(loader) == batches(whole)[2:]


def test_what_the_run_dropped_does_not_come_back():
    """With drop_last the epoch ends with its last whole step, also for a run whose steps are smaller."""
    state = state_at(2, size=2, drop_last=True)
    loader = alone(state=state, drop_last=True)

    assert (state["consumed"], state["ended"]) == (8, True)
    assert loader.iteration == 1
    assert len(batches(loader)) == 4


BATCHES = [[0, 1], [2], [3, 4], [5], [6, 7, 8]]  # 3 steps of 2 processes


@pytest.mark.parametrize("sampling", [{"batch_size": 2, "shuffle": True}, {"batch_sampler": BATCHES}])
def test_the_epoch_continues_while_another_process_has_a_batch(sampling):
    def make(rank):
        loader = DataLoader(range(LENGTH), **sampling)
        return prepare_data_loader(loader, num_processes=2, process_index=rank, even_batches=False)

    passes = [make(0), make(1)]
    iterators = [iter(loader) for loader in passes]
    for _ in range(2):
        for iterator in iterators:
            next(iterator)
        states = [loader.state_dict() for loader in passes]
    assert [state["ended"] for state in states] == [False, False]
    first, second = make(0), make(1)
    first.load_state_dict(states[0])
    second.load_state_dict(states[1])

    assert (len(batches(first)), batches(second)) == (1, [])
    assert first.iteration == second.iteration == 1
