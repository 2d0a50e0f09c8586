"""Steps of the batches that process 0 reads: one part for each process.

Batches are read as the processes need them, each collated by itself, so that nothing has to be cut or joined.
Only where a user's function slices, or where the dataset gives whole batches, rows are taken apart here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from typing import Any, NamedTuple

from accel_data.dispatch.channel import ABSENT
from accel_data.order.layout import StepRows, spread_out
from accel_data.stream.dataset import count_rows
from accel_ops.trees.tensors import concatenate, slice_tensors


class Read(NamedTuple):
    """A batch as process 0 has read it.

    Args:
        batch: The batch.
        fill: What is in it, as of one process; None if all samples are real, as many as in any other.
    """

    batch: Any
    fill: StepRows | None


class Round(NamedTuple):
    """One step of all processes.

    Args:
        parts: The batch of each process; `ABSENT` for a process that has none.
        fill: What the processes have in it; may be None if every process has a full batch.
    """

    parts: list[Any]
    fill: StepRows | None


@dataclass(frozen=True)
class Rounds:
    """How batches become rounds.

    Args:
        num_processes: Number of processes.
        size: Samples of each batch of a process; None if the dataset gives whole batches of any size.
        even: Give every process a batch in each round, by repeating the first ones of the epoch; of a batch
            that is sliced, a piece of one size, by repeating its own rows.
        drop_last: Drop a round that is not full.
        slice_fn: Takes the part of a process out of a batch for all; None if each batch is that of one
            process.
    """

    num_processes: int
    size: int | None
    even: bool
    drop_last: bool
    slice_fn: Callable[..., Any] | None

    def of(self, reads: Iterator[Read]) -> Iterator[Round]:
        """Make rounds of what is read.

        Args:
            reads: One batch per process and round; or one per round, if there is a slicing function.

        Yields:
            The rounds.
        """
        # Padding comes from the start of the epoch, as in a loader that every process reads by itself.
        head: list[Read] = []
        count = 1 if self.slice_fn else self.num_processes
        while group := list(islice(reads, count)):
            head = head or group
            if self.slice_fn is not None:
                yield self._sliced(group[0])
            elif len(group) == count or not self.drop_last:
                yield self._dealt(group, head)

    def _dealt(self, group: list[Read], head: list[Read]) -> Round:
        parts = [read.batch for read in group]
        rows = [self._rows(read) for read in group]
        missing = self.num_processes - len(parts)
        if not self.even:
            if not missing:
                return Round(parts, None)
            rows += [0] * missing
            return Round(parts + [ABSENT] * missing, StepRows(tuple(rows), tuple(rows)))
        # Of a ready-made batch it is known whether it is padding: then none of its rows is real.
        real = [
            size if read.fill is None else read.fill.real[0] * (size if self.size is None else 1)
            for size, read in zip(rows, group, strict=True)
        ]
        # A process without a batch gets one of padding alone, as every process has to take this step.
        padding = list(islice(cycle(head), missing))
        parts += [read.batch for read in padding]
        return Round(parts, StepRows.of(real + [0] * missing, rows + [self._rows(read) for read in padding]))

    def _sliced(self, read: Read) -> Round:
        assert self.slice_fn is not None
        batch, count = read.batch, self.num_processes
        rows = count_rows(batch)
        real = read.fill.real[0] if read.fill else rows
        # Up to the next multiple, so that all processes get pieces of one size.
        if self.even and rows % count:
            batch = extended(batch, rows, rows + -rows % count)
            rows += -rows % count
        sizes = spread_out(rows, count)
        places = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        parts = [
            self.slice_fn(batch, place, process_index=rank, num_processes=count) if sizes[rank] else ABSENT
            for rank, place in enumerate(places)
        ]
        return Round(parts, StepRows(real_in(real, sizes), sizes))

    def _rows(self, read: Read) -> int:
        if self.size is None:
            return count_rows(read.batch)
        return self.size if read.fill is None else read.fill.rows[0]


def real_in(real: int, rows: Sequence[int]) -> tuple[int, ...]:
    """Divide the first `real` samples of a step over processes that have so many rows of it in turn."""
    starts = accumulate(rows[:-1], initial=0)
    return tuple(min(max(real - start, 0), size) for start, size in zip(starts, rows, strict=True))


def extended(batch: Any, rows: int, wanted: int) -> Any:
    """Repeat the rows of a batch, from its start, until there are as many as wanted."""
    whole, part = divmod(wanted, rows)
    try:
        return concatenate([batch] * whole + ([slice_tensors(batch, slice(0, part))] if part else []))
    # What concatenating raises for parts of unlike types.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"split_batches=True cannot pad a batch of {rows} rows to {wanted}, so that all processes get "
            f"pieces of one size ({error}). Pass even_batches=False, or split_batches=False."
        ) from error
