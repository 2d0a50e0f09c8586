import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_data.order import permutation
from accel_data.order.mixing import mix_seed
from accel_data.order.permutation import KeyedPermutation

LARGEST = 2**63 - 1
BOUNDARIES = [2**14, 2**14 + 1, 129**2 - 1, 129**2, 129**2 + 1, 129 * 130, 129 * 130 + 1]


@pytest.fixture
def no_table(monkeypatch):
    monkeypatch.setattr(permutation, "_TABLE", 0)


def whole(length, key=7):
    return KeyedPermutation(length, key).at(torch.arange(length))


def by_hand(length, key, position):
    """Return one entry as the docstring says, with Python's integers, which have no end."""
    columns = math.isqrt(length - 1) + 1
    rows = -(-length // columns)
    row, column = divmod(position, columns)
    while True:
        for number in range(8):
            mixed = mix_seed(key, number)
            hashed = ((column, row)[number % 2] ^ (mixed >> 32)) * (mixed & 0x7FFFFFFF | 0x40000001)
            hashed = -(((hashed ^ (hashed >> 32)) & (2**32 - 1)) * 0x7FEB352D) >> 32
            if number % 2:
                column = (column + (hashed * columns >> 31)) % columns
            else:
                row = (row + (hashed * rows >> 31)) % rows
        if row * columns + column < length:
            return row * columns + column


@pytest.mark.parametrize("length", [*range(70), *BOUNDARIES])
@pytest.mark.parametrize("table", [2**14, 0])
def test_each_sample_has_one_position(monkeypatch, length, table):
    monkeypatch.setattr(permutation, "_TABLE", table)
    order = whole(length)

    assert torch.equal(order.sort().values, torch.arange(length))
    assert torch.equal(KeyedPermutation(length, 7).positions_of(order), torch.arange(length))


lengths = st.one_of(
    st.integers(1, 10**6),
    st.integers(2**14, LARGEST),
    st.integers(15, 63).flatmap(lambda bits: st.integers(2**bits - 3, min(2**bits + 3, LARGEST))),
    st.integers(2**62, LARGEST),
)


@given(lengths, st.integers(0, 2**64 - 1), st.data())
def test_entries_of_any_length_are_those_made_by_hand_and_lead_back(length, key, data):
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=5))
    order = KeyedPermutation(length, key)
    entries = order.at(torch.tensor(positions))

    assert all(0 <= entry < length for entry in entries.tolist())
    assert order.positions_of(entries).tolist() == positions
    assert [order[position] for position in positions] == entries.tolist()
    if length > 2**14:
        assert entries.tolist() == [by_hand(length, key, position) for position in positions]


# To change these is to have interrupted runs continue in another order.
KNOWN = {
    5: [2, 0, 4, 4, 3],
    16384: [3656, 6484, 9854, 8974, 10581],
    16385: [8887, 14431, 15337, 14615, 1786],
    10**10: [7862796793, 6807257538, 4779883242, 5598174952, 4995634235],
    LARGEST: [
        7191225374902478032,
        645742327083734690,
        2887737675814652552,
        6019088579340889766,
        8098243339778665146,
    ],
}


@pytest.mark.parametrize("length", KNOWN)
def test_orders_are_these_on_every_platform_and_version(length):
    order = KeyedPermutation(length, mix_seed(1, 2))

    assert order.at(torch.tensor([0, 1, 2, length // 2, length - 1])).tolist() == KNOWN[length]


def test_blocks_of_any_size_and_shape_give_the_same():
    order = KeyedPermutation(10**10, 3)
    positions = torch.randint(10**10, (3, 7000), generator=torch.Generator().manual_seed(0))
    one_by_one = [order[position] for position in positions[1, :5].tolist()]

    assert order.at(positions).shape == (3, 7000)
    assert order.at(positions)[1, :5].tolist() == one_by_one
    assert torch.equal(order.at(positions.T), order.at(positions).T)
    assert torch.equal(order.positions_of(order.at(positions)), positions)


def test_what_leaves_the_range_goes_through_the_rounds_again(no_table):
    # Of the 10 * 11 cells of the rectangle 9 are beyond the range.
    assert torch.equal(whole(101).sort().values, torch.arange(101))
    assert whole(101).tolist() == [by_hand(101, 7, position) for position in range(101)]


def test_an_order_of_the_first_entries():
    order = KeyedPermutation(10**10, 3, num_samples=10)

    assert len(order) == 10
    assert list(order) == KeyedPermutation(10**10, 3).at(torch.arange(10)).tolist()
    assert order[-1] == order[9]
    with pytest.raises(IndexError, match="Position 10 of an order of 10 samples"):
        order[10]


def test_keys_give_different_orders():
    first = whole(20, key=1)

    assert not torch.equal(first, whole(20, key=2))
    assert not torch.equal(whole(20000, key=1), whole(20000, key=2))


def test_impossible_lengths_are_rejected():
    with pytest.raises(ValueError, match=r"from 0 to 2\*\*63 - 1 entries, but length=-1"):
        KeyedPermutation(-1, 0)
    with pytest.raises(ValueError, match="length=9223372036854775808"):
        KeyedPermutation(2**63, 0)
    with pytest.raises(ValueError, match="num_samples=6, but the permutation has 5 entries"):
        KeyedPermutation(5, 0, num_samples=6)


def test_it_is_computed_on_the_cpu_whatever_the_default_device():
    expected = [KeyedPermutation(length, 1)[3] for length in (5, 10**10)]
    with torch.device("meta"):
        assert [KeyedPermutation(length, 1)[3] for length in (5, 10**10)] == expected
