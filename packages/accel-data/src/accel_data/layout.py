"""Which positions of the global order each process gets at each step: arithmetic, and cutting out a share.

One step hands `share` positions to every process: process 0 the first ones, process 1 the next, and so on.
When the positions end inside a step, the step is dropped, padded from the start of the order, or left uneven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from accel_data.order import Order, take

__all__ = ["Layout", "Share", "cut"]

_ENTRIES = 2048  # turned into lists at once; more would leave the processor's cache before they are used


@dataclass
class Share:
    """What one pass over a sampler holds; filled in while it is walked.

    Args:
        num_batches: Number of batches; None until it is known.
        real: For the last batch, how many entries of each process are real; None if nothing is padded.
        now: The same for the batch at hand, where it is not known before.
    """

    num_batches: int | None = None
    real: tuple[int, ...] | None = None
    now: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Layout:
    """How an order is cut.

    Args:
        share: Positions that each process gets per step.
        num_processes: Number of processes.
        drop_last: Drop a step that is not full.
        even: Pad a step that is not full, from the start of the order.
        start: Position of the first step.
    """

    share: int
    num_processes: int
    drop_last: bool
    even: bool
    start: int = 0

    @property
    def group(self) -> int:
        """Positions of one step, all processes together."""
        return self.share * self.num_processes

    def tail(self, length: int) -> int:
        """Positions in the last step if that is not full, else 0."""
        return max(length - self.start, 0) % self.group

    def num_steps(self, length: int) -> int:
        """Steps that process 0 takes."""
        full = max(length - self.start, 0) // self.group
        return full + bool(self.tail_sizes(self.tail(length))[0])

    def num_batches(self, length: int, rank: int | None) -> int:
        """Steps that a process takes; batches of all processes together for None."""
        full = max(length - self.start, 0) // self.group
        sizes = self.tail_sizes(self.tail(length))
        if rank is None:
            return full * self.num_processes + sum(map(bool, sizes))
        return full + bool(sizes[rank])

    def real_sizes(self, tail: int) -> tuple[int, ...]:
        """Real entries of each process in a last step of `tail` positions."""
        return tuple(min(max(tail - rank * self.share, 0), self.share) for rank in range(self.num_processes))

    def tail_sizes(self, tail: int) -> tuple[int, ...]:
        """Entries of each process, padding included, in a last step of `tail` positions."""
        if tail == 0 or self.drop_last:
            return (0,) * self.num_processes
        return (self.share,) * self.num_processes if self.even else self.real_sizes(tail)

    def padded(self, tail: int) -> tuple[int, ...] | None:
        """Real entries of each process if a last step of `tail` positions is padded, else None."""
        return self.real_sizes(tail) if tail and self.even and not self.drop_last else None


def cut(order: Order, layout: Layout, rank: int | None, share: Share) -> Iterator[list[Any]]:
    """Cut the batches of one process out of a global order.

    Args:
        order: The global order.
        layout: How it is cut.
        rank: The process; None for all of them, step by step.
        share: Gets the number of batches and the padding: at once where the order has a length, else at its
            end.

    Yields:
        Lists of entries of the order.
    """
    if isinstance(order, Iterator):
        yield from _cut_stream(order, layout, rank, share)
        return
    length = len(order)
    tail = layout.tail(length)
    share.num_batches = layout.num_batches(length, rank)
    share.real = layout.padded(tail)
    tails = [take(order, positions) for positions in _tail_positions(layout, length, rank)]
    many = max(_ENTRIES // layout.share, 1)
    if isinstance(order, torch.Tensor):
        rows = _rows(order, layout, rank)
        del order  # at most this process's share stays in memory
        for first in range(0, len(rows), many):
            yield from rows[first : first + many].tolist()
    elif isinstance(order, range):
        starts = _starts(layout, length, rank)
        for first in range(0, len(starts), many):
            some = starts[first : first + many]
            column = torch.arange(some.start, some.stop, some.step, device="cpu").unsqueeze(1)
            yield from (column + torch.arange(layout.share, device="cpu")).tolist()
    else:
        for position in _starts(layout, length, rank):
            yield order[position : position + layout.share]
    yield from tails


def _rows(order: torch.Tensor, layout: Layout, rank: int | None) -> torch.Tensor:
    steps = max(len(order) - layout.start, 0) // layout.group
    used = order[layout.start : layout.start + steps * layout.group]
    rows = used.view(steps, layout.num_processes, layout.share)
    if rank is None or layout.num_processes == 1:
        return rows.flatten(0, 1)
    return rows[:, rank].clone()


def _starts(layout: Layout, length: int, rank: int | None) -> range:
    """Return the position at which each full batch begins."""
    first, step = (0, layout.share) if rank is None else (rank * layout.share, layout.group)
    end = max(length - layout.tail(length), layout.start)
    return range(layout.start + first, end, step)


def _tail_positions(layout: Layout, length: int, rank: int | None) -> Iterator[Sequence[int]]:
    tail = layout.tail(length)
    sizes = layout.tail_sizes(tail)
    for process in range(layout.num_processes) if rank is None else (rank,):
        first = length - tail + process * layout.share
        if sizes[process]:
            yield [position % length for position in range(first, first + sizes[process])]


def _cut_stream(order: Iterator[Any], layout: Layout, rank: int | None, share: Share) -> Iterator[list[Any]]:
    head = list(islice(order, layout.group))  # padding comes from here
    entries = islice(chain(head, order), layout.start, None)
    ranks = range(layout.num_processes) if rank is None else (rank,)
    while group := list(islice(entries, layout.group)):
        missing = layout.group - len(group)
        sizes = layout.tail_sizes(len(group)) if missing else (layout.share,) * layout.num_processes
        if missing:
            share.real = layout.padded(len(group))
            group += [head[i % len(head)] for i in range(missing)]
        for process in ranks:
            if sizes[process]:
                first = process * layout.share
                yield group[first : first + sizes[process]]
