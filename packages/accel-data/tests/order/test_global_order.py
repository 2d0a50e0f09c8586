import random
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_data.order.global_order import (
    IsolatedRNG,
    SeedableRandomSampler,
    draw,
    order_of,
    sampler_generator,
    take,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Shuffled:
    """A sampler that draws from all the global generators."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        import numpy

        first = torch.randperm(self.length).tolist()
        random.shuffle(first)
        yield from (first[i] for i in numpy.random.permutation(self.length).tolist())


class Endless:
    def __iter__(self):
        while True:
            yield from torch.randperm(5).tolist()


def test_a_seedable_sampler_visits_every_sample_once():
    assert sorted(SeedableRandomSampler(range(100), data_seed=1)) == list(range(100))


def test_a_seedable_sampler_gives_an_order_of_seed_and_epoch():
    one, other = SeedableRandomSampler(range(50), data_seed=1), SeedableRandomSampler(range(50), data_seed=1)
    torch.manual_seed(5)
    epochs = [list(one), list(one)]
    torch.manual_seed(6)
    other.set_epoch(1)

    assert epochs[0] != epochs[1]
    assert list(other) == epochs[1]
    assert list(SeedableRandomSampler(range(50), data_seed=2)) != epochs[0]


def test_with_one_seed_the_order_is_that_of_accelerate_and_torch():
    sampler = SeedableRandomSampler(range(12), data_seed=5)

    for epoch in range(3):
        # As torch.utils.data.DistributedSampler draws it, and accelerate with use_seedable_sampler=True.
        assert list(sampler) == torch.randperm(12, generator=seeded(5 + epoch)).tolist()


def test_a_seedable_sampler_takes_its_seed_from_generator_or_torch():
    torch.manual_seed(7)

    assert SeedableRandomSampler(range(5)).initial_seed == 7
    assert SeedableRandomSampler(range(5), generator=seeded(8)).initial_seed == 8


@pytest.mark.parametrize(("replacement", "wanted"), [(False, 7), (False, 20), (False, 45), (True, 33)])
def test_a_seedable_sampler_keeps_the_options_of_a_random_sampler(replacement, wanted):
    indices = list(SeedableRandomSampler(range(20), replacement, wanted, data_seed=0))

    assert len(indices) == wanted
    assert set(indices) <= set(range(20))
    if not replacement:
        assert len(set(indices)) == min(wanted, 20)


@given(st.integers(1, 40), st.integers(1, 100), st.integers(0, 5))
def test_an_order_with_the_users_generator_is_that_of_torch(length, wanted, seed):
    theirs, ours = seeded(seed), seeded(seed)
    expected = [list(RandomSampler(range(length), num_samples=wanted, generator=theirs)) for _ in range(2)]
    sampler = RandomSampler(range(length), num_samples=wanted, generator=ours)

    assert [order_of(sampler, None, epoch).tolist() for epoch in range(2)] == expected
    assert torch.equal(theirs.get_state(), ours.get_state())


def test_an_order_with_replacement_and_the_users_generator_is_that_of_torch():
    expected = list(RandomSampler(range(20), replacement=True, num_samples=70, generator=seeded()))
    sampler = RandomSampler(range(20), replacement=True, num_samples=70, generator=seeded())

    assert order_of(sampler, None, 0) == expected


def test_known_samplers_give_random_access():
    assert order_of(SequentialSampler(range(9)), 0, 0) == range(9)
    seedable = order_of(SeedableRandomSampler(range(9), data_seed=0), None, 0)
    assert seedable.dtype == torch.int32
    assert seedable.tolist() == list(SeedableRandomSampler(range(9), data_seed=0))


def test_drawing_stays_below_two_permutations():
    generator = seeded()
    drawn = draw(RandomSampler(range(10)), generator)
    after = generator.get_state()
    again = seeded()
    torch.randperm(10, generator=again)

    assert sorted(drawn.tolist()) == list(range(10))
    assert torch.equal(after, again.get_state())


@pytest.mark.parametrize(
    "sampler", [Shuffled(20), WeightedRandomSampler(torch.ones(20), 20), SubsetRandomSampler(range(20))]
)
def test_samplers_that_draw_globally_are_walked_apart(sampler):
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    first = order_of(sampler, 3, 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    torch.manual_seed(2)
    random.seed(2)

    assert order_of(sampler, 3, 0) == first
    assert order_of(sampler, 3, 1) != first
    assert order_of(sampler, 4, 0) != first


def test_a_sampler_without_length_is_an_iterator_drawn_apart():
    def start(seed):
        torch.manual_seed(seed)
        entries = order_of(Endless(), 3, 0)
        taken = [next(entries) for _ in range(3000)]
        return taken, torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())

    assert start(0) == start(1)
    assert start(0)[1]


def test_isolated_generators_continue_where_they_stopped():
    once, twice = IsolatedRNG(5), IsolatedRNG(5)
    with once:
        expected = torch.rand(4).tolist()
    with twice:
        seen = torch.rand(2).tolist()
    torch.rand(10)
    with twice:
        seen += torch.rand(2).tolist()

    assert seen == expected


def test_what_is_walked_may_have_to_be_agreed():
    orders = []
    order_of([3, 1, 2], None, 0, lambda walk: orders.append(walk()) or orders[0])

    assert orders == [[3, 1, 2]]


def test_the_users_generator_is_found():
    generator = seeded()

    assert sampler_generator(BatchSampler(RandomSampler([1], generator=generator), 1, False)) is generator
    assert sampler_generator(WeightedRandomSampler([1.0], 1, generator=generator)) is generator
    assert sampler_generator(SequentialSampler([1])) is None
    assert sampler_generator(SeedableRandomSampler([1], generator=generator)) is None


@pytest.mark.parametrize("order", [range(5, 15), torch.arange(5, 15), list(range(5, 15))])
def test_entries_are_taken_at_positions(order):
    assert take(order, [0, 3, 9]) == [5, 8, 14]


def test_taking_a_few_entries_makes_no_list_of_all():
    order = torch.arange(10**5)
    tracemalloc.start()
    try:
        take(order, [0, 3, 9])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 10**5  # bytes; a list takes eight for each entry
