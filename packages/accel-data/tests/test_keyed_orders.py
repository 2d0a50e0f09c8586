"""Loaders whose shuffled order is computed from a key: any size, constant memory, every guarantee."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accel_data import SeedableRandomSampler, prepare_data_loader, skip_first_batches
from accel_data.order import permutation
from accel_data.order.global_order import KEYED_FROM
from accel_data.order.mixing import mix_seed
from accel_data.order.permutation import KeyedPermutation

pytestmark = pytest.mark.usefixtures("fresh_state")

HUGE = 10**10


class Numbers:
    """A dataset of any length that is only ever read by index."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


@pytest.fixture(params=["table", "rounds"])
def kind(request, monkeypatch):
    """Short orders come from a table, and are made by rounds in a second run of the test."""
    if request.param == "rounds":
        monkeypatch.setattr(permutation, "_TABLE", 0)


def made(length, processes=1, rank=0, batch_size=2, order="keyed", seed=5, **kwargs):
    options = {key: kwargs.pop(key) for key in ("num_workers", "drop_last", "sampler") if key in kwargs}
    shuffle = {} if "sampler" in options else {"shuffle": True}
    return prepare_data_loader(
        DataLoader(Numbers(length), batch_size, **shuffle, **options),
        num_processes=processes,
        process_index=rank,
        data_seed=seed,
        order=order,
        **kwargs,
    )


def loaders(length, processes, batch_size=2, **kwargs):
    return [made(length, processes, rank, batch_size, **kwargs) for rank in range(processes)]


def real_samples(some, steps=None):
    """Read some steps of all processes in turn; return the samples that are no padding."""
    samples, iterators = [], [iter(loader) for loader in some]
    while steps is None or steps > 0:
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            break
        for rank, (loader, batch) in enumerate(zip(some, batches, strict=True)):
            if batch is not None:
                samples += batch.tolist()[: loader.real_samples[rank] if loader.real_samples else None]
        steps = None if steps is None else steps - 1
    return samples


def key_of(loader, epoch=0):
    return mix_seed(loader.state_dict()["seed"], epoch)


@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 4),
    processes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stop=st.integers(0, 5),
    epoch=st.integers(0, 2),
    split=st.booleans(),
    even=st.booleans(),
)
@pytest.mark.usefixtures("kind")
def test_a_run_continues_with_any_number_of_processes(
    length, batch_size, processes, stop, epoch, split, even
):
    size = batch_size * (processes[0] * processes[1] if split else 1)
    options = {"split_batches": split, "even_batches": even}
    expected = KeyedPermutation(length, mix_seed(5, epoch)).at(torch.arange(length)).tolist()
    some = loaders(length, processes[0], size, **options)
    for loader in some:
        loader.set_epoch(epoch)
    stop = min(stop, len(some[0]))
    seen = real_samples(some, stop)
    state = some[0].state_dict()
    others = loaders(length, processes[1], size, **options)
    for loader in others:
        loader.load_state_dict(state)
    ended = state["ended"]
    seen += [] if ended else real_samples(others)

    assert seen == expected
    assert real_samples(others) == [
        *KeyedPermutation(length, mix_seed(5, epoch + 1)).at(torch.arange(length)).tolist()
    ]


@settings(max_examples=50)
@given(
    length=st.integers(2**14, 2**63 - 1),
    batch_size=st.integers(1, 64),
    worlds=st.tuples(st.integers(1, 65_536), st.integers(1, 65_536)),
    data=st.data(),
)
def test_any_rank_of_any_number_stands_at_its_position(length, batch_size, worlds, data):
    ranks = [data.draw(st.integers(0, world - 1)) for world in worlds]
    groups = [batch_size * world for world in worlds]
    loader = made(length, worlds[0], ranks[0], batch_size)
    order = KeyedPermutation(length, mix_seed(5, 0))
    steps = -(-length // groups[0])
    assert len(loader) == steps

    step = data.draw(st.integers(0, steps - 1))
    state = {**loader.state_dict(), "consumed": step * groups[0], "batches": step, "step_size": groups[0]}
    # Another number of processes continues from there. Steps beyond the end are padding from the start.
    other = made(length, worlds[1], ranks[1], batch_size)
    other.load_state_dict(state)
    for read, rank in ((skip_first_batches(loader, step), ranks[0]), (other, ranks[1])):
        place = step * groups[0] + rank * batch_size
        expected = [order[(place + number) % length] for number in range(batch_size)]
        assert next(iter(read)).tolist() == expected


def read_on_one_of_several(length, stop, states, dispatch):
    loader = prepare_data_loader(
        DataLoader(Numbers(length), 3, shuffle=True), data_seed=5, order="keyed", dispatch_batches=dispatch
    )
    if states:
        loader.load_state_dict(states[0])
    seen, state = [], None
    for step, batch in enumerate(loader, 1):
        real = loader.real_samples
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        seen.append(batch.tolist()[: real[rank] if real else None])
        if step == stop:
            state = loader.state_dict()
            break
    return seen, state


@pytest.mark.parametrize("dispatch", [False, True])
def test_processes_share_one_order_and_continue_as_others(world, dispatch):
    length, expected = 40, KeyedPermutation(40, mix_seed(5, 0)).at(torch.arange(40)).tolist()
    for before, after in ((1, 2), (2, 3), (4, 1)):
        begun = world.run(read_on_one_of_several, length, 2, [], dispatch, size=before)
        states = [state for _, state in begun]
        rest = world.run(read_on_one_of_several, length, None, states[:1], dispatch, size=after)
        read = [
            sample
            for ranks in ([seen for seen, _ in begun], [seen for seen, _ in rest])
            for step in range(max(map(len, ranks)))
            for batches in ranks
            for sample in (batches[step] if step < len(batches) else [])
        ]

        assert read == expected
        assert all(state == states[0] for state in states)


class Largest(TorchDispatchMode):
    """Notes how many operators run, and the largest tensor that one of them returns."""

    def __init__(self):
        super().__init__()
        self.num_bytes = self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        if isinstance(result, torch.Tensor):
            self.num_bytes = max(self.num_bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("processes", [1, 1024, 65_536])
def test_a_shard_of_ten_billion_begins_anywhere_equally(processes):
    calls = []
    for start in (0, 0.5, 0.9):
        loader = made(HUGE, processes, processes // 2, 8)
        step = int(start * len(loader))
        with Largest() as largest:
            batches = iter(skip_first_batches(loader, step))
            for _ in range(500):  # more than come at first
                batch = next(batches)
        place = (step + 499) * 8 * processes + processes // 2 * 8
        order = KeyedPermutation(HUGE, key_of(loader))

        assert batch.tolist() == [order[place + number] for number in range(8)]
        assert largest.num_bytes <= 64 * 1024
        calls.append(largest.calls)
    # Where a number leaves the range, some go through the rounds again.
    assert max(calls) < 1.5 * min(calls)


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_way_of_reading_takes_a_huge_dataset(dispatch, workers):
    loader = made(HUGE, 1, 0, 4, num_workers=workers, dispatch_batches=dispatch)
    order = KeyedPermutation(HUGE, key_of(loader))
    iterator = iter(loader)
    seen = [sample for _ in range(3) for sample in next(iterator).tolist()]
    state = loader.state_dict()
    del iterator
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    other = made(HUGE, 1, 0, 4, num_workers=workers, dispatch_batches=dispatch, seed=6)
    other.load_state_dict(torch.load(saved, weights_only=True))
    seen += next(iter(other)).tolist()

    assert seen == [order[position] for position in range(16)]
    assert len(loader) == HUGE // 4


def test_samplers_that_are_not_prepared_begin_anywhere():
    sampler = SeedableRandomSampler(range(HUGE), data_seed=3)
    order = KeyedPermutation(HUGE, mix_seed(3, 0))
    far = HUGE // 2
    batched = skip_first_batches(DataLoader(range(HUGE), 4, sampler=sampler), far // 4)
    single = skip_first_batches(DataLoader(range(HUGE), None, sampler=sampler), far)
    plain = skip_first_batches(DataLoader(range(HUGE), 4), far // 4)

    assert next(iter(sampler)) == order[0]
    assert next(iter(batched)).tolist() == [order[far + number] for number in range(4)]
    assert next(iter(single)) == order[far]
    assert next(iter(plain)).tolist() == [*range(far, far + 4)]


@given(
    length=st.integers(1, 30),
    skipped=st.integers(0, 12),
    batch_size=st.one_of(st.none(), st.integers(1, 4)),
    drop_last=st.booleans(),
    seeded=st.booleans(),
)
def test_skipping_by_seeking_is_skipping_by_walking(length, skipped, batch_size, drop_last, seeded):
    def sampler():
        return (
            SeedableRandomSampler(range(length), data_seed=3) if seeded else SequentialSampler(range(length))
        )

    def loader(sampler):
        more = {} if batch_size is None else {"drop_last": drop_last}
        return DataLoader(range(length), batch_size, sampler=sampler, **more)

    order_sampler, sought = sampler(), sampler()
    plain = loader(order_sampler)
    expected = [[torch.as_tensor(batch).tolist() for batch in plain][skipped:] for _ in range(2)]
    short = skip_first_batches(loader(sought), min(skipped, len(plain)))

    assert [[torch.as_tensor(batch).tolist() for batch in short] for _ in range(2)] == expected


def test_orders_are_keyed_from_a_size_on_unless_requested_otherwise():
    def is_keyed(length, **kwargs):
        return made(length, **kwargs).get_sampler().is_keyed

    assert KEYED_FROM == 2**27  # docs/data.md says so
    assert [is_keyed(length, order=None) for length in (KEYED_FROM - 1, KEYED_FROM)] == [False, True]
    assert is_keyed(10, order="keyed")
    assert not is_keyed(KEYED_FROM, order="torch")
    generator = torch.Generator().manual_seed(4)
    own = RandomSampler(Numbers(10), generator=generator)
    assert is_keyed(10, sampler=own, use_seedable_sampler=True, seed=None)
    assert made(10, sampler=own).get_sampler() is own
    given = SeedableRandomSampler(Numbers(10), keyed=True)
    assert is_keyed(10, sampler=given, order=None)
    assert not is_keyed(10, sampler=given, order="torch")
    assert given.is_keyed


def test_samples_that_may_come_twice_are_drawn_by_torch():
    twice = RandomSampler(range(10), num_samples=25)
    replaced = RandomSampler(range(10), replacement=True)
    first = RandomSampler(Numbers(HUGE), num_samples=6)

    for sampler in (twice, replaced):
        drawn = made(10, sampler=sampler, order="torch")
        assert [batch.tolist() for batch in made(10, sampler=sampler)] == [batch.tolist() for batch in drawn]
    assert real_samples(loaders(HUGE, 2, sampler=first)) == [
        KeyedPermutation(HUGE, mix_seed(5, 0))[place] for place in range(6)
    ]


@pytest.mark.parametrize("orders", [("torch", "keyed"), ("keyed", "torch")])
def test_a_run_continues_in_the_order_in_which_it_began(orders):
    first, second = (made(20, order=order) for order in orders)
    whole = real_samples([made(20, order=orders[0])])
    seen = real_samples([first], 3)
    second.load_state_dict(first.state_dict())

    assert seen + real_samples([second]) == whole
    assert real_samples([second]) == real_samples([first])
    assert whole != real_samples([made(20, order=orders[1])])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_plain_stateful_loaders_reject_what_torch_does_not_draw():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    state = made(20, use_stateful_dataloader=True).state_dict()
    assert not set(state) & {"_num_yielded", "_snapshot"}

    # The other way round the rest of the epoch comes in the order in which it began.
    plain = torchdata.StatefulDataLoader(Numbers(20), 2, shuffle=True)
    iterator = iter(plain)
    seen = [sample for _ in range(3) for sample in next(iterator).tolist()]
    loader = made(20, use_stateful_dataloader=True)
    loader.load_state_dict(plain.state_dict())
    seen += real_samples([loader])

    assert sorted(seen) == list(range(20))
    assert real_samples([loader]) == KeyedPermutation(20, key_of(loader, 1)).at(torch.arange(20)).tolist()


def test_other_orders_are_rejected():
    with pytest.raises(ValueError, match="order must be 'torch', 'keyed' or None, but it is 'random'"):
        made(10, order="random")


def test_batch_samplers_around_a_seedable_sampler_take_the_order():
    sampler = SeedableRandomSampler(range(HUGE), data_seed=3, keyed=True)
    loader = prepare_data_loader(DataLoader(Numbers(HUGE), batch_sampler=BatchSampler(sampler, 3, False)))

    assert next(iter(loader)).tolist() == [
        KeyedPermutation(HUGE, mix_seed(3, 0))[place] for place in range(3)
    ]
