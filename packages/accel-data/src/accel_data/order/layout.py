"""Which positions of the global order each rank gets at each step: arithmetic, and slicing out a shard.

One step gives `per_rank_batch` positions to every rank: rank 0 the first ones, rank 1 the next, and so on.
If the positions end inside a step, that step is dropped, padded, or left uneven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

import torch

from accel_data.order.global_order import Order, take
from accel_data.order.permutation import KeyedPermutation

_ENTRIES = 2048  # turned into lists at once; more would leave the CPU cache before they are used
_COMPUTED = 8192  # the same for computed orders, where each call has a fixed cost


class StepRows(NamedTuple):
    """The batch size of every rank in a step that is padded, or in which a rank has no batch.

    Args:
        real: Entries of each rank without padding. The padding is at the end of its batch.
        rows: Entries of each rank, padding included; 0 for a rank that has no batch.
    """

    real: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, real: Sequence[int], rows: Sequence[int]) -> StepRows | None:
        """Make one; None if nothing is padded and every rank has a batch."""
        step_rows = cls(tuple(real), tuple(rows))
        return None if step_rows.real == step_rows.rows and all(step_rows.rows) else step_rows


@dataclass
class EpochInfo:
    """Number of batches and last-step padding of one epoch, set while iterating.

    Args:
        num_batches: Number of batches; None until known.
        last_rows: The sizes in the last step.
        current_rows: The sizes in the current step, if they are not known in advance.
    """

    num_batches: int | None = None
    last_rows: StepRows | None = None
    current_rows: StepRows | None = None


def split_evenly(count: int, num_processes: int) -> tuple[int, ...]:
    """Split a number of entries over the ranks as evenly as possible; the first ranks get more."""
    each, more = divmod(count, num_processes)
    return (each + 1,) * more + (each,) * (num_processes - more)


@dataclass(frozen=True)
class Layout:
    """How an order is split into steps and batches.

    Args:
        per_rank_batch: Positions that each rank gets per step.
        num_processes: Number of ranks.
        drop_last: Drop an incomplete last step.
        even_batches: Pad an incomplete last step, so that all ranks have equally many entries.
        start: Position of the first step.
        balance_last_step: Split an incomplete last step as evenly as possible, and pad it with its own
            entries, each equally often if that takes at most `per_rank_batch` entries per rank. Otherwise the
            first ranks have `per_rank_batch` entries in it, and it is padded from the start of the order.
    """

    per_rank_batch: int
    num_processes: int
    drop_last: bool
    even_batches: bool
    start: int = 0
    balance_last_step: bool = False

    @cached_property
    def step_size(self) -> int:
        """Positions of one step over all ranks."""
        return self.per_rank_batch * self.num_processes

    def remainder(self, length: int) -> int:
        """Positions in the last step if it is incomplete, else 0."""
        return max(length - self.start, 0) % self.step_size

    def num_batches(self, length: int, rank: int | None) -> int:
        """Steps of a rank; for None, batches of all ranks."""
        full, more = self._num_full_steps(length), self._num_ranks_in_last_step(self.remainder(length))
        return full * self.num_processes + more if rank is None else full + (rank < more)

    def batches_per_rank(self, length: int) -> tuple[int, ...]:
        """Steps of each rank."""
        full, more = self._num_full_steps(length), self._num_ranks_in_last_step(self.remainder(length))
        return (full + 1,) * more + (full,) * (self.num_processes - more)

    def real_sizes(self, remainder: int) -> tuple[int, ...]:
        """Real entries of each rank in a last step of `remainder` positions."""
        if self.balance_last_step and not self.even_batches:
            return split_evenly(remainder, self.num_processes)
        full, rest = divmod(remainder, self._padded_batch_size(remainder))
        some = (rest,) if rest else ()
        return (
            (self._padded_batch_size(remainder),) * full
            + some
            + (0,) * (self.num_processes - full - len(some))
        )

    def last_step_sizes(self, remainder: int) -> tuple[int, ...]:
        """Entries of each rank, padding included, in a last step of `remainder` positions."""
        if remainder == 0 or self.drop_last:
            return (0,) * self.num_processes
        return (
            (self._padded_batch_size(remainder),) * self.num_processes
            if self.even_batches
            else self.real_sizes(remainder)
        )

    def step_rows(self, remainder: int, rank: int | None) -> StepRows | None:
        """The sizes in a last step of `remainder` positions, if the rank (None for any) has a batch in it."""
        sizes = self.last_step_sizes(remainder)
        has_batch = any(sizes) if rank is None else sizes[rank] > 0
        return StepRows.of(self.real_sizes(remainder), sizes) if has_batch else None

    def slots(self, remainder: int, rank: int) -> range:
        """Slots of a rank in a last step of `remainder` positions, padding included; see `position`."""
        if rank >= self._num_ranks_in_last_step(remainder):
            return range(0)
        if self.balance_last_step and not self.even_batches:
            each, more = divmod(remainder, self.num_processes)
            first = rank * each + min(rank, more)
            return range(first, first + each + (rank < more))
        piece = self._padded_batch_size(remainder)
        end = (rank + 1) * piece
        return range(rank * piece, end if self.even_batches else min(end, remainder))

    def position(self, slot: int, remainder: int, length: int) -> int:
        """Position of a slot in a last step of `remainder` positions; from `remainder` on it is padding."""
        if slot < remainder or self.balance_last_step:
            return length - remainder + slot % remainder
        return (slot - remainder) % length

    def split_step(self, entries: list[Any], head: list[Any], rank: int | None) -> list[list[Any]]:
        """Split one step into batches.

        Args:
            entries: Its entries, without padding.
            head: The first entries of the order.
            rank: The rank; None for all ranks.

        Returns:
            The batches of the ranks that have one.
        """
        per_rank_batch, remainder = self.per_rank_batch, len(entries)
        if remainder == self.step_size and rank is not None:
            return [entries[rank * per_rank_batch : (rank + 1) * per_rank_batch]]
        ranks = range(self.num_processes) if rank is None else (rank,)
        if remainder == self.step_size:
            return [entries[rank * per_rank_batch : (rank + 1) * per_rank_batch] for rank in ranks]
        sizes = self.last_step_sizes(remainder)
        source = entries if self.balance_last_step else head
        # Padding follows the real entries of the step, so that they come first on every rank.
        entries = entries + [source[i % len(source)] for i in range(sum(sizes) - remainder)]
        ends = list(accumulate(sizes))
        return [entries[ends[rank] - sizes[rank] : ends[rank]] for rank in ranks if sizes[rank]]

    def _num_full_steps(self, length: int) -> int:
        """Number of full steps."""
        return max(length - self.start, 0) // self.step_size

    def _num_ranks_in_last_step(self, remainder: int) -> int:
        """Number of ranks (the first ones) with a batch in a last step of `remainder` positions."""
        if remainder == 0 or self.drop_last:
            return 0
        if self.even_batches:
            return self.num_processes
        return (
            min(remainder, self.num_processes)
            if self.balance_last_step
            else -(-remainder // self.per_rank_batch)
        )

    def _padded_batch_size(self, remainder: int) -> int:
        """Entries of each rank in a padded last step of `remainder` positions."""
        if not (self.balance_last_step and self.even_batches and remainder):
            return self.per_rank_batch
        balanced = remainder // math.gcd(remainder, self.num_processes)  # each entry occurs equally often
        return balanced if balanced <= self.per_rank_batch else -(-remainder // self.num_processes)


def cut(
    order: Order,
    layout: Layout,
    rank: int | None,
    info: EpochInfo,
    count: Callable[[Any], int] | None = None,
) -> Iterator[list[Any]]:
    """Slice the batches of one rank out of a global order.

    Args:
        order: The global order.
        layout: How it is split.
        rank: The rank; None for all ranks, step by step.
        info: Receives the number of batches and the padding: immediately if the order has a length, else at
            its end.
        count: Returns how many samples an entry has; by default one.

    Yields:
        Lists of entries of the order.
    """
    if isinstance(order, Iterator):
        yield from _cut_stream(order, layout, rank, info, count)
        return
    length = len(order)
    # Before the first batch is yielded: the consumer has to know which one is the last.
    info.num_batches = layout.num_batches(length, rank)
    if isinstance(order, torch.Tensor):
        # Taken now, as the order is deleted below.
        last_batches = [take(order, positions) for positions in _last_step_positions(layout, length, rank)]
        rows = _rows(order, layout, rank)
        del order  # at most this rank's shard stays in memory
        num_rows = max(_ENTRIES // layout.per_rank_batch, 1)
        for first in range(0, len(rows), num_rows):
            yield from rows[first : first + num_rows].tolist()
    else:
        yield from _full_batches(order, layout, rank)
        last_batches = [take(order, positions) for positions in _last_step_positions(layout, length, rank)]
    if last_batches:
        # Not before the last step: it has an entry for each of possibly thousands of ranks.
        info.last_rows = layout.step_rows(layout.remainder(length), rank)
    if info.last_rows and count:
        assert isinstance(order, list)  # of batches
        batches = [take(order, positions) for positions in _last_step_positions(layout, length, None)]
        info.last_rows = count_samples(info.last_rows, batches, count)
    yield from last_batches


def _full_batches(
    order: range | KeyedPermutation | list[Any], layout: Layout, rank: int | None
) -> Iterator[list[Any]]:
    """Slice the batches of all full steps."""
    starts, per_rank_batch = _starts(layout, len(order), rank), layout.per_rank_batch
    if isinstance(order, list):
        for position in starts:
            yield order[position : position + per_rank_batch]
        return
    # One call makes many batches: counting in Python would cost as much per sample. The first call makes
    # few, so that an epoch begins immediately.
    first, num_rows = 0, max(_ENTRIES // per_rank_batch, 1)
    while first < len(starts):
        some = starts[first : first + num_rows]
        column = torch.arange(len(some), device="cpu").mul_(starts.step).add_(some.start).unsqueeze(1)
        positions = column + torch.arange(per_rank_batch, device="cpu")
        if isinstance(order, range):
            yield from positions.tolist()
        else:
            for piece in torch.split(order.at(positions), max(_ENTRIES // per_rank_batch, 1)):
                yield from piece.tolist()
            num_rows = max(_COMPUTED // per_rank_batch, 1)
        first += len(some)


def _rows(order: torch.Tensor, layout: Layout, rank: int | None) -> torch.Tensor:
    steps = max(len(order) - layout.start, 0) // layout.step_size
    used = order[layout.start : layout.start + steps * layout.step_size]
    rows = used.view(steps, layout.num_processes, layout.per_rank_batch)
    if rank is None or layout.num_processes == 1:
        return rows.flatten(0, 1)
    # A copy, so that the memory of the full order is freed.
    return rows[:, rank].clone()


def _starts(layout: Layout, length: int, rank: int | None) -> range:
    """Return the position at which each full batch begins."""
    first, step = (
        (0, layout.per_rank_batch) if rank is None else (rank * layout.per_rank_batch, layout.step_size)
    )
    end = max(length - layout.remainder(length), layout.start)
    return range(layout.start + first, end, step)


def _last_step_positions(layout: Layout, length: int, rank: int | None) -> Iterator[Sequence[int]]:
    remainder = layout.remainder(length)
    for process in range(layout.num_processes) if rank is None else (rank,):
        if slots := layout.slots(remainder, process):
            yield [layout.position(slot, remainder, length) for slot in slots]


def _cut_stream(
    order: Iterator[Any],
    layout: Layout,
    rank: int | None,
    info: EpochInfo,
    count: Callable[[Any], int] | None,
) -> Iterator[list[Any]]:
    head = list(islice(order, layout.step_size))  # padding comes from here
    entries = islice(chain(head, order), layout.start, None)
    while step := list(islice(entries, layout.step_size)):
        # Only an incomplete step, the last one, has sizes to report.
        if len(step) < layout.step_size:
            info.last_rows = layout.step_rows(len(step), rank)
            if info.last_rows and count:
                info.last_rows = count_samples(info.last_rows, layout.split_step(step, head, None), count)
        yield from layout.split_step(step, head, rank)


def count_samples(
    step_rows: StepRows, batches: list[list[Any]], count: Callable[[Any], int]
) -> StepRows | None:
    """Convert the sizes of a step from entries of several samples each to samples.

    Args:
        step_rows: The sizes in entries.
        batches: The entries of the ranks that have some.
        count: Returns the number of samples of an entry.
    """
    rows = [sum(map(count, batch)) for batch in batches] + [0] * (len(step_rows.rows) - len(batches))
    return StepRows.of([size if real else 0 for size, real in zip(rows, step_rows.real, strict=True)], rows)
