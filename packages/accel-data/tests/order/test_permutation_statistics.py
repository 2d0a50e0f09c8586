"""Keyed permutations next to those of `torch.randperm`: what is the threshold is taken from the latter."""

import math
from functools import cache
from itertools import permutations

import pytest
import torch

from accel_data.order import permutation
from accel_data.order.mixing import mix_seed
from accel_data.order.permutation import KeyedPermutation

DRAWS, SPLITS = 50, 200


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def keyed(length, seed, epoch):
    return KeyedPermutation(length, mix_seed(seed, epoch)).at(torch.arange(length))


def correlation(one, other):
    return float(torch.corrcoef(torch.stack([one, other]).double())[0, 1])


def uniform_cells(one, other, length):
    """Return the chi-square of how two numbers below `length` fall into 16 x 16 cells."""
    cells = torch.bincount((one * 16 // length) * 16 + other * 16 // length, minlength=256).double()
    return float((cells - cells.mean()).square().sum() / cells.mean())


def num_cycles(order):
    lowest, ahead = torch.arange(len(order)), order.clone()
    for _ in range(len(order).bit_length()):  # the lowest number of 2, 4, 8 ... steps ahead
        lowest, ahead = torch.minimum(lowest, lowest[ahead]), ahead[ahead]
    return int((lowest == torch.arange(len(order))).sum())


def longest_increase(order):
    """Return the length of the longest increasing subsequence."""
    lasts = torch.full((len(order),), len(order))
    for entry in order[:300].tolist():
        lasts[torch.searchsorted(lasts, entry)] = entry
    return int((lasts < len(order)).sum())


def statistics(order, next_epoch, next_seed):
    """Return numbers that are distributed in the same way for all random orders of a length."""
    length = len(order)
    places = torch.arange(length)
    row = math.isqrt(length - 1) + 1  # the columns of the rectangle of a keyed permutation
    inverse = torch.argsort(order)
    return {
        "fixed points": int((order == places).sum()),
        "cycles": num_cycles(order),
        "longest increasing subsequence": longest_increase(order),
        "positions of each part": uniform_cells(places, order, length),
        "remainders of positions": uniform_cells(
            places % 16 * (length // 16), order % 16 * (length // 16), length
        ),
        "neighbours": uniform_cells(order[:-1], order[1:], length),
        "serial correlation": correlation(order[:-1], order[1:]),
        "correlation a row apart": correlation(order[:-row], order[row:]),
        "different steps": len(torch.unique((order[1:] - order[:-1]) % length)),
        "different steps a row apart": len(torch.unique((order[row:] - order[:-row]) % length)),
        "correlation of epochs": correlation(order, next_epoch),
        "correlation of seeds": correlation(order, next_seed),
        "different shifts between epochs": len(torch.unique((next_epoch - order) % length)),
        "fixed points from epoch to epoch": int((next_epoch[inverse] == places).sum()),
        "fixed points from seed to seed": int((next_seed[inverse] == places).sum()),
    }


def collected(length, draw, count):
    rows = [statistics(*draw(length, number)) for number in range(count)]
    return {name: torch.tensor([row[name] for row in rows]).double() for name in rows[0]}


def of_torch(length, number):
    generator = torch.Generator().manual_seed(number)
    return [torch.randperm(length, generator=generator) for _ in range(3)]


def of_keys(length, number):
    return keyed(length, number, 0), keyed(length, number, 1), keyed(length, number + 1, 0)


def distance(some, others):
    """Return the Kolmogorov-Smirnov distance of two samples."""
    values = torch.cat([some, others])
    below = [
        torch.searchsorted(part.sort().values, values, right=True) / len(part) for part in (some, others)
    ]
    return float((below[0] - below[1]).abs().max())


@cache
def known_to_torch(length):
    return collected(length, of_torch, 3 * DRAWS)


def told_apart(length):
    """Return the statistics by which keyed orders differ from those of torch."""
    torchs, keys = known_to_torch(length), collected(length, of_keys, DRAWS)
    generator = torch.Generator().manual_seed(0)
    different = {}
    for name, known in torchs.items():
        # How far parts of torch's own orders are from the rest: the largest of many such distances, and a
        # quarter more, as there are many statistics.
        splits = [known[torch.randperm(len(known), generator=generator)] for _ in range(SPLITS)]
        threshold = 1.25 * max(distance(split[:DRAWS], split[DRAWS:]) for split in splits)
        found = distance(keys[name], known)
        if found > threshold:
            different[name] = found, threshold
    return different


@pytest.mark.parametrize("length", [40, 20011])
def test_orders_are_distributed_like_those_of_torch(length):
    assert told_apart(length) == {}


def test_six_rounds_are_distinguished(monkeypatch):
    monkeypatch.setattr(permutation, "_ROUNDS", 6)
    assert "different steps a row apart" in told_apart(20011)


def test_two_rounds_are_distinguished_by_much(monkeypatch):
    monkeypatch.setattr(permutation, "_ROUNDS", 2)
    assert len(told_apart(20011)) > 4


def frequencies(length, count, draw):
    """Return the chi-square of how often each permutation of a few numbers comes."""
    places = torch.tensor([length**power for power in range(length)])
    codes = torch.stack([draw(number) for number in range(count)]) @ places
    known = torch.tensor(
        [sum(a * length**b for b, a in enumerate(one)) for one in permutations(range(length))]
    )
    often = (codes.unsqueeze(1) == known).sum(0).double()
    assert int(often.sum()) == count
    return float((often - often.mean()).square().sum() / often.mean())


@pytest.mark.parametrize("of", ["seeds", "epochs"])
@pytest.mark.parametrize("length", [2, 3, 5])
def test_each_permutation_of_a_few_comes_equally_often(length, of):
    count = 20 * math.factorial(length)
    generator = torch.Generator().manual_seed(0)
    ours = frequencies(length, count, lambda n: keyed(length, *((n, 0) if of == "seeds" else (0, n))))
    theirs = [
        frequencies(length, count, lambda _: torch.randperm(length, generator=generator)) for _ in range(20)
    ]

    assert ours < 1.25 * max(theirs)


def test_each_sample_comes_equally_often_at_each_position(monkeypatch):
    # Rounds over a rectangle of 4 x 5 cells: the table is not asked.
    length, count = 17, 1000
    monkeypatch.setattr(permutation, "_TABLE", 0)
    generator = torch.Generator().manual_seed(0)

    def spread(draw):
        orders = torch.stack([draw(number) for number in range(count)])
        often = torch.stack([torch.bincount(column, minlength=length) for column in orders.T]).double()
        return float((often - count / length).square().sum() / (count / length))

    theirs = [spread(lambda _: torch.randperm(length, generator=generator)) for _ in range(20)]

    assert spread(lambda number: keyed(length, number, 0)) < 1.1 * max(theirs)
