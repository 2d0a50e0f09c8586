import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accel_data.order.global_order import SeedableRandomSampler
from accel_data.order.seeding import Seeding, walk_and_verify
from accel_state.process.state import current_process


class Custom:
    def __init__(self, entries):
        self.entries = entries

    def __len__(self):
        return len(self.entries)

    def __iter__(self):
        return iter(self.entries)


class Owner:
    """Stands for an Accelerator."""


def batches(sampler):
    return BatchSampler(sampler, 2, False)


def seed_of(seeded):
    batch_sampler, seed = seeded
    return getattr(batch_sampler.sampler, "initial_seed", seed)


def seeding(use_seedable_sampler=False, data_seed=None, is_distributed=False, gradient_state=None):
    return Seeding(use_seedable_sampler, data_seed, is_distributed, gradient_state)


def test_who_gets_a_seed():
    generator = torch.Generator().manual_seed(8)
    given = seeding(data_seed=5)

    assert seed_of(given.make_seedable(batches(RandomSampler(range(5))))) == 5
    assert seed_of(given.make_seedable(batches(Custom([1])))) == 5
    assert seed_of(given.make_seedable(batches(SequentialSampler(range(5))))) is None
    assert seed_of(given.make_seedable(batches([1, 2]))) is None
    assert seed_of(given.make_seedable(batches(SeedableRandomSampler(range(5), data_seed=3)))) == 3
    kept = batches(RandomSampler(range(5), generator=generator))
    assert given.make_seedable(kept) == (kept, None)
    assert seed_of(seeding(use_seedable_sampler=True).make_seedable(kept)) == 8
    assert seed_of(seeding(use_seedable_sampler=True, data_seed=5).make_seedable(kept)) == 5


def test_the_given_sampler_is_left_alone():
    mine = batches(RandomSampler(range(5), num_samples=3))
    sampler = mine.sampler
    seeded, _ = seeding().make_seedable(mine)

    assert mine.sampler is sampler
    assert (seeded.sampler.num_samples, seeded.batch_size) == (3, 2)


def test_a_seed_comes_from_torch_and_the_place_of_the_loader():
    def seeds(gradient_state):
        return [
            seed_of(seeding(gradient_state=gradient_state).make_seedable(batches(RandomSampler(range(5)))))
            for _ in range(2)
        ]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = seeds(Owner())

    assert torch.equal(torch.get_rng_state(), before)
    assert first[0] != first[1]
    assert seeds(Owner()) == first
    assert seeds(None) == [first[0]] * 2
    torch.manual_seed(2)
    assert seeds(Owner()) != first


def shares_its_seed():
    torch.manual_seed(current_process().rank)
    some = seeding(is_distributed=True)
    return [
        seed_of(some.make_seedable(batches(RandomSampler(range(5))))),
        seed_of(some.make_seedable(batches(Custom([1, 2])))),
        seed_of(some.make_seedable(batches(SeedableRandomSampler(range(5))))),
    ]


def test_processes_share_the_seed_of_process_0(world):
    first, second = world.run(shares_its_seed, size=2)

    assert first == second
    assert len(set(first)) == 2


def prepares_alone():
    if current_process().is_main:
        return seed_of(seeding().make_seedable(batches(RandomSampler(range(5)))))  # must not wait for others
    return None


def test_a_loader_of_one_process_waits_for_nobody(world):
    world.run(prepares_alone, size=2)


def agrees(kind):
    rank = current_process().rank
    if kind == "same":
        assert walk_and_verify(lambda: [(1, "a"), 2]) == [(1, "a"), 2]
    elif kind == "different":
        with pytest.raises(
            RuntimeError, match=r"not give the same order .*process 0: 3 entries.*process 1: 3 entries"
        ):
            walk_and_verify(lambda: [1, 2, rank])
    else:
        expected = (KeyError, "broken") if rank else (RuntimeError, "process 1: KeyError: 'broken'")
        with pytest.raises(expected[0], match=expected[1]):
            walk_and_verify(lambda: {0: []}[rank] if not rank else {}["broken"])


@pytest.mark.parametrize("kind", ["same", "different", "failing"])
def test_an_order_is_agreed_or_rejected_everywhere(world, kind):
    world.run(agrees, kind, size=2)


def test_without_a_process_group_an_order_is_taken_as_it_is():
    assert walk_and_verify(lambda: [3, 1]) == [3, 1]
