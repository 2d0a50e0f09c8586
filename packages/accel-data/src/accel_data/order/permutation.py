"""A shuffled order without memory: the sample at each position is computed from a key.

- Random access in constant time and memory, both ways: position -> sample, and sample -> position.
- Integers of at most 63 bits only: the same on every platform and with every version of torch.
"""

from __future__ import annotations

import math
import operator
from typing import SupportsIndex

import torch

from accel_data.order.mixing import mix_seed

# With six, numbers of one column fail statistical tests; see order/test_permutation_statistics.py.
_ROUNDS = 8
_TABLE = 2**14  # up to here a table: rounds over few rows and columns are not random enough
_BLOCK = 8192  # positions at once: 64 KiB for each of the few tensors, which fit into the CPU cache
_LOW = 2**32 - 1
# The first multiplier of the hash `lowbias32` (Wellons 2018); odd, and of 31 bits.
_MULTIPLIER = 0x7FEB352D


class KeyedPermutation:
    """A permutation of `range(length)` that is a function of a key, computed on demand.

    The generalized Feistel cipher of Black and Rogaway ("Ciphers with Arbitrary Finite Domains", CT-RSA
    2002): a number below `length` is a row and a column of a rectangle of at least `length` cells, as close
    to a square as possible. Each round adds a hash of the column to the row, or of the row to the column. A
    number that leaves the range goes through the rounds again (cycle walking); as the rectangle has less than
    one extra row, this happens to one in the square root of `length`. Up to 16,384 numbers are sorted by a
    hash of each instead, and kept in a table.

    Args:
        length: How many numbers are permuted, at most 2**63 - 1.
        key: An integer of 64 bits. Each key gives a different permutation.
        num_samples: How many of the permutation's first entries make up the order; all by default.

    Raises:
        ValueError: If `length` is negative or too large, or `num_samples` is negative or more than that.
    """

    def __init__(self, length: int, key: int, num_samples: int | None = None) -> None:
        if not 0 <= length < 2**63:
            raise ValueError(f"A permutation has from 0 to 2**63 - 1 entries, but length={length}.")
        if num_samples is not None and not 0 <= num_samples <= length:
            raise ValueError(f"num_samples={num_samples}, but the permutation has {length} entries.")
        self.length = length
        self.key = key
        self._num_samples = length if num_samples is None else num_samples
        self._keys = [_round_key(key, number) for number in range(_ROUNDS)]
        self._table = _table(length, self._keys) if length <= _TABLE else None
        self._num_columns = math.isqrt(max(length, 1) - 1) + 1
        self._num_rows = -(-length // self._num_columns)
        # Columns of the last row that are in the range.
        self._last_columns = length - (self._num_rows - 1) * self._num_columns

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, position: SupportsIndex) -> int:
        index = operator.index(position)
        if not -len(self) <= index < len(self):
            raise IndexError(f"Position {index} of an order of {len(self)} samples.")
        return int(self.at(torch.tensor([index % len(self)], device="cpu")))

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the samples at some positions.

        Args:
            positions: An int64 tensor of any shape on the CPU, with values from 0 to `length` - 1.

        Returns:
            A new int64 tensor of the same shape.
        """
        if self._table is not None:
            return self._table[positions]
        return self._permute(positions, forward=True)

    def positions_of(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the positions of some samples; the inverse of `at`.

        Args:
            samples: An int64 tensor of any shape on the CPU, with values from 0 to `length` - 1.

        Returns:
            A new int64 tensor of the same shape. A position beyond `num_samples` is not in the order.
        """
        if self._table is not None:
            return torch.argsort(self._table)[samples]
        return self._permute(samples, forward=False)

    def _permute(self, numbers: torch.Tensor, forward: bool) -> torch.Tensor:
        flat = numbers.reshape(-1)
        if len(flat) <= _BLOCK:
            return self._block(flat, forward).view(numbers.shape)
        # In blocks: tensors of many numbers would not fit into the CPU cache.
        permuted = torch.empty_like(flat)
        for start in range(0, len(flat), _BLOCK):
            permuted[start : start + _BLOCK] = self._block(flat[start : start + _BLOCK], forward)
        return permuted.view(numbers.shape)

    def _block(self, numbers: torch.Tensor, forward: bool) -> torch.Tensor:
        row = torch.div(numbers, self._num_columns, rounding_mode="floor")
        column = numbers - row * self._num_columns
        self._rounds(row, column, forward)
        # Compare rows and columns, not products: these would overflow near 2**63.
        while (outside := (row == self._num_rows - 1).logical_and_(column >= self._last_columns)).any():
            rejected = row[outside], column[outside]
            self._rounds(*rejected, forward)
            row[outside], column[outside] = rejected
        return row.mul_(self._num_columns).add_(column)

    def _rounds(self, row: torch.Tensor, column: torch.Tensor, forward: bool) -> None:
        """Apply all rounds to numbers, in place."""
        hashed, negative = torch.empty_like(row), torch.empty_like(row)
        rounds = range(_ROUNDS)
        for number in rounds if forward else reversed(rounds):
            source, target, size = (
                (row, column, self._num_columns) if number % 2 else (column, row, self._num_rows)
            )
            _hash(source, self._keys[number], hashed, negative)
            # From -size to 0: a fraction of 31 bits times the size, faster than a division.
            hashed.mul_(size).bitwise_right_shift_(31)
            if forward:
                target.add_(hashed)
            else:
                target.sub_(hashed).sub_(size)
            # Modulo the size: the arithmetic shift of negative numbers is -1, of others 0.
            torch.bitwise_right_shift(target, 63, out=negative)
            target.sub_(negative, alpha=size)


def _hash(numbers: torch.Tensor, key: tuple[int, int], out: torch.Tensor, spare: torch.Tensor) -> None:
    """Hash numbers of 32 bits to -(2**31) + 1 ... 0; no product has more than 63 bits."""
    torch.bitwise_xor(numbers, key[0], out=out).mul_(key[1])
    torch.bitwise_right_shift(out, 32, out=spare)
    out.bitwise_xor_(spare).bitwise_and_(_LOW).mul_(-_MULTIPLIER).bitwise_right_shift_(32)


def _round_key(key: int, number: int) -> tuple[int, int]:
    """Return 32 bits, and an odd multiplier of 31 bits, of which the first one is set."""
    mixed = mix_seed(key, number)
    return mixed >> 32, mixed & 0x7FFFFFFF | 0x40000001


def _table(length: int, keys: list[tuple[int, int]]) -> torch.Tensor:
    """Return the permutation that sorts numbers by 62 bits of hashes, as int64 of shape (length,)."""
    halves = []
    for round_keys in (keys[::2], keys[1::2]):
        hashed = torch.arange(length, device="cpu")
        spare = torch.empty_like(hashed)
        for key in round_keys:
            _hash(hashed, key, hashed, spare)
            hashed.neg_()
        halves.append(hashed)
    # Stable, so that the rare equal hashes are sorted the same everywhere.
    return torch.argsort(halves[0].bitwise_left_shift_(31).bitwise_or_(halves[1]), stable=True)
