"""Which positions of the global order each process gets at each step: arithmetic, and cutting out a share.

One step hands `share` positions to every process: process 0 the first ones, process 1 the next, and so on.
When the positions end inside a step, the step is dropped, padded, or left uneven.
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

_ENTRIES = 2048  # turned into lists at once; more would leave the processor's cache before they are used
_COMPUTED = 8192  # of an order that is computed, whose calls have to pay for themselves


class StepRows(NamedTuple):
    """The sizes of all processes' batches in a step that is padded, or in which a process has no batch.

    Args:
        real: Entries of each process that are no padding. The padding is at the end of its batch.
        rows: Entries of each process, padding included; 0 for a process that has no batch.
    """

    real: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, real: Sequence[int], rows: Sequence[int]) -> StepRows | None:
        """Return what is to be known of a step: None if nothing is padded and every process has a batch."""
        fill = cls(tuple(real), tuple(rows))
        return None if fill.real == fill.rows and all(fill.rows) else fill


@dataclass
class Share:
    """The length of one pass over a sampler; filled in while it is walked.

    Args:
        num_batches: Number of batches; None until it is known.
        last: The fill of the last batch's step.
        now: That of the batch at hand, where it is not known before.
    """

    num_batches: int | None = None
    last: StepRows | None = None
    now: StepRows | None = None


def spread_out(count: int, num_processes: int) -> tuple[int, ...]:
    """Divide a number of entries over the processes, as equally as can be; the first ones get more."""
    each, more = divmod(count, num_processes)
    return (each + 1,) * more + (each,) * (num_processes - more)


@dataclass(frozen=True)
class Layout:
    """How an order is cut.

    Args:
        share: Positions that each process gets per step.
        num_processes: Number of processes.
        drop_last: Drop a step that is not full.
        even: Pad a step that is not full, so that all processes have equally many entries.
        start: Position of the first step.
        spread: Share out a step that is not full as equally as can be, and pad it with its own entries,
            each equally often where that takes no more than `share` on a process. Otherwise the first
            processes have `share` entries in it, and it is padded from the start of the order.
    """

    share: int
    num_processes: int
    drop_last: bool
    even: bool
    start: int = 0
    spread: bool = False

    @cached_property
    def group(self) -> int:
        """Positions of one step, all processes together."""
        return self.share * self.num_processes

    def tail(self, length: int) -> int:
        """Positions in the last step if that is not full, else 0."""
        return max(length - self.start, 0) % self.group

    def num_batches(self, length: int, rank: int | None) -> int:
        """Steps that a process takes; batches of all processes together for None."""
        full, more = self._full(length), self._num_in_tail(self.tail(length))
        return full * self.num_processes + more if rank is None else full + (rank < more)

    def batches_of_each(self, length: int) -> tuple[int, ...]:
        """Steps that each process takes."""
        full, more = self._full(length), self._num_in_tail(self.tail(length))
        return (full + 1,) * more + (full,) * (self.num_processes - more)

    def real_sizes(self, tail: int) -> tuple[int, ...]:
        """Real entries of each process in a last step of `tail` positions."""
        if self.spread and not self.even:
            return spread_out(tail, self.num_processes)
        full, part = divmod(tail, self._piece(tail))
        some = (part,) if part else ()
        return (self._piece(tail),) * full + some + (0,) * (self.num_processes - full - len(some))

    def tail_sizes(self, tail: int) -> tuple[int, ...]:
        """Entries of each process, padding included, in a last step of `tail` positions."""
        if tail == 0 or self.drop_last:
            return (0,) * self.num_processes
        return (self._piece(tail),) * self.num_processes if self.even else self.real_sizes(tail)

    def fill(self, tail: int, rank: int | None) -> StepRows | None:
        """The fill of a last step of `tail` positions, if the process (None for all) takes part in it."""
        sizes = self.tail_sizes(tail)
        is_there = any(sizes) if rank is None else sizes[rank] > 0
        return StepRows.of(self.real_sizes(tail), sizes) if is_there else None

    def places(self, tail: int, rank: int) -> range:
        """Places of a process in a last step of `tail` positions, padding included; see `position`."""
        if rank >= self._num_in_tail(tail):
            return range(0)
        if self.spread and not self.even:
            each, more = divmod(tail, self.num_processes)
            first = rank * each + min(rank, more)
            return range(first, first + each + (rank < more))
        piece = self._piece(tail)
        last = (rank + 1) * piece
        return range(rank * piece, last if self.even else min(last, tail))

    def position(self, place: int, tail: int, length: int) -> int:
        """Position of a place in a last step of `tail` positions; from `tail` on a place is padding."""
        if place < tail or self.spread:
            return length - tail + place % tail
        return (place - tail) % length

    def deal(self, entries: list[Any], head: list[Any], rank: int | None) -> list[list[Any]]:
        """Cut one step.

        Args:
            entries: Its entries, without padding.
            head: The first ones of the order.
            rank: The process; None for all of them.

        Returns:
            The batches of those processes that have one.
        """
        share, tail = self.share, len(entries)
        if tail == self.group and rank is not None:
            return [entries[rank * share : (rank + 1) * share]]
        ranks = range(self.num_processes) if rank is None else (rank,)
        if tail == self.group:
            return [entries[rank * share : (rank + 1) * share] for rank in ranks]
        sizes = self.tail_sizes(tail)
        source = entries if self.spread else head
        # Padding follows the real entries of the step, so that they come first on every process.
        entries = entries + [source[i % len(source)] for i in range(sum(sizes) - tail)]
        ends = list(accumulate(sizes))
        return [entries[ends[rank] - sizes[rank] : ends[rank]] for rank in ranks if sizes[rank]]

    def _full(self, length: int) -> int:
        """Number of full steps."""
        return max(length - self.start, 0) // self.group

    def _num_in_tail(self, tail: int) -> int:
        """Number of processes, the first ones, that have something of a last step of `tail` positions."""
        if tail == 0 or self.drop_last:
            return 0
        if self.even:
            return self.num_processes
        return min(tail, self.num_processes) if self.spread else -(-tail // self.share)

    def _piece(self, tail: int) -> int:
        """Entries of each process in a padded last step of `tail` positions."""
        if not (self.spread and self.even and tail):
            return self.share
        alike = tail // math.gcd(tail, self.num_processes)  # each entry is there equally often
        return alike if alike <= self.share else -(-tail // self.num_processes)


def cut(
    order: Order,
    layout: Layout,
    rank: int | None,
    share: Share,
    count: Callable[[Any], int] | None = None,
) -> Iterator[list[Any]]:
    """Cut the batches of one process out of a global order.

    Args:
        order: The global order.
        layout: How it is cut.
        rank: The process; None for all of them, step by step.
        share: Gets the number of batches and the padding: at once where the order has a length, else at its
            end.
        count: Returns how many samples an entry stands for; by default each is one.

    Yields:
        Lists of entries of the order.
    """
    if isinstance(order, Iterator):
        yield from _cut_stream(order, layout, rank, share, count)
        return
    length = len(order)
    # Before the first batch is given: who takes it has to know which one is the last.
    share.num_batches = layout.num_batches(length, rank)
    if isinstance(order, torch.Tensor):
        # Taken now, as the order itself is dropped below.
        tails = [take(order, positions) for positions in _tail_positions(layout, length, rank)]
        rows = _rows(order, layout, rank)
        del order  # at most this process's share stays in memory
        many = max(_ENTRIES // layout.share, 1)
        for first in range(0, len(rows), many):
            yield from rows[first : first + many].tolist()
    else:
        yield from _full_batches(order, layout, rank)
        tails = [take(order, positions) for positions in _tail_positions(layout, length, rank)]
    if tails:
        # Not before the last step: it has an entry for each process, of which there may be many thousands.
        share.last = layout.fill(layout.tail(length), rank)
    if share.last and count:
        assert isinstance(order, list)  # of batches
        parts = [take(order, positions) for positions in _tail_positions(layout, length, None)]
        share.last = counted(share.last, parts, count)
    yield from tails


def _full_batches(
    order: range | KeyedPermutation | list[Any], layout: Layout, rank: int | None
) -> Iterator[list[Any]]:
    """Cut the batches of all steps but one that is not full."""
    starts, share = _starts(layout, len(order), rank), layout.share
    if isinstance(order, list):
        for position in starts:
            yield order[position : position + share]
        return
    # One call makes many batches: to count in Python costs as much for each sample. Few come first, so
    # that an epoch begins at once.
    first, many = 0, max(_ENTRIES // share, 1)
    while first < len(starts):
        some = starts[first : first + many]
        column = torch.arange(len(some), device="cpu").mul_(starts.step).add_(some.start).unsqueeze(1)
        positions = column + torch.arange(share, device="cpu")
        if isinstance(order, range):
            yield from positions.tolist()
        else:
            for piece in torch.split(order.at(positions), max(_ENTRIES // share, 1)):
                yield from piece.tolist()
            many = max(_COMPUTED // share, 1)
        first += len(some)


def _rows(order: torch.Tensor, layout: Layout, rank: int | None) -> torch.Tensor:
    steps = max(len(order) - layout.start, 0) // layout.group
    used = order[layout.start : layout.start + steps * layout.group]
    rows = used.view(steps, layout.num_processes, layout.share)
    if rank is None or layout.num_processes == 1:
        return rows.flatten(0, 1)
    # A copy, so that the memory of the whole order is freed.
    return rows[:, rank].clone()


def _starts(layout: Layout, length: int, rank: int | None) -> range:
    """Return the position at which each full batch begins."""
    first, step = (0, layout.share) if rank is None else (rank * layout.share, layout.group)
    end = max(length - layout.tail(length), layout.start)
    return range(layout.start + first, end, step)


def _tail_positions(layout: Layout, length: int, rank: int | None) -> Iterator[Sequence[int]]:
    tail = layout.tail(length)
    for process in range(layout.num_processes) if rank is None else (rank,):
        if places := layout.places(tail, process):
            yield [layout.position(place, tail, length) for place in places]


def _cut_stream(
    order: Iterator[Any],
    layout: Layout,
    rank: int | None,
    share: Share,
    count: Callable[[Any], int] | None,
) -> Iterator[list[Any]]:
    head = list(islice(order, layout.group))  # padding comes from here
    entries = islice(chain(head, order), layout.start, None)
    while group := list(islice(entries, layout.group)):
        # The last step: only an incomplete one has something to say.
        if len(group) < layout.group:
            share.last = layout.fill(len(group), rank)
            if share.last and count:
                share.last = counted(share.last, layout.deal(group, head, None), count)
        yield from layout.deal(group, head, rank)


def counted(fill: StepRows, parts: list[list[Any]], count: Callable[[Any], int]) -> StepRows | None:
    """Return in samples what is known of a step in entries that stand for several samples each.

    Args:
        fill: The fill in entries.
        parts: The entries of the processes that have some.
        count: Returns the number of samples of an entry.
    """
    rows = [sum(map(count, part)) for part in parts] + [0] * (len(fill.rows) - len(parts))
    return StepRows.of([size if real else 0 for size, real in zip(rows, fill.real, strict=True)], rows)
