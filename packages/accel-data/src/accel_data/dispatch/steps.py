"""Steps of the batches that process 0 reads: one part for each process.

Batches are read as the processes need them, each collated by itself, so that nothing has to be cut or joined.
Only where a user's function slices, or where the dataset gives whole batches, rows are taken apart here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, NamedTuple

from accel_data.dispatch.channel import ABSENT
from accel_data.order.shares import Fill, spread_out
from accel_data.stream.dataset import count_rows
from accel_ops.trees.tensors import concatenate, slice_tensors


class Read(NamedTuple):
    """A batch as process 0 has read it.

    Args:
        batch: The batch.
        fill: What is in it, as of one process; None if all samples are real, as many as in any other.
    """

    batch: Any
    fill: Fill | None


class Round(NamedTuple):
    """One step of all processes.

    Args:
        parts: The batch of each process; `ABSENT` for a process that has none.
        fill: What the processes have in it; may be None if every process has a full batch.
    """

    parts: list[Any]
    fill: Fill | None


@dataclass(frozen=True)
class Rounds:
    """How batches become rounds.

    Args:
        num_processes: Number of processes.
        size: Samples of each batch of a process; None if the dataset gives whole batches of any size.
        even: Give every process equally many samples, by padding from the first batch.
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
        first: Any = None
        count = 1 if self.slice_fn else self.num_processes
        while group := list(islice(reads, count)):
            # Padding comes from the first batch, as in a loader that every process reads by itself.
            if first is None:
                first = group[0].batch
            if self.slice_fn is not None:
                yield self._sliced(group[0], first)
            elif len(group) == count or not self.drop_last:
                yield self._dealt(group, first)

    def _dealt(self, group: list[Read], first: Any) -> Round:
        parts = [read.batch for read in group]
        missing = self.num_processes - len(parts)
        if not self.even:
            if not missing:
                return Round(parts, None)
            rows = [self._rows(read) for read in group] + [0] * missing
            return Round(parts + [ABSENT] * missing, Fill(tuple(rows), tuple(rows)))
        rows = [self._rows(read) for read in group]
        real = [read.fill.real[0] if read.fill else size for size, read in zip(rows, group, strict=True)]
        if self.size is None:
            wanted = max(rows)
            parts = [extend(part, first, wanted - size) for part, size in zip(parts, rows, strict=True)]
            rows = [wanted] * len(parts)
        # A process without a batch gets one of padding alone, as every process has to take this step.
        parts += [resize(first, self._rows(Read(first, None)), rows[0])] * missing
        return Round(parts, Fill.of(real + [0] * missing, rows + [rows[0]] * missing))

    def _sliced(self, read: Read, first: Any) -> Round:
        assert self.slice_fn is not None
        batch, count = read.batch, self.num_processes
        rows = count_rows(batch)
        real = read.fill.real[0] if read.fill else rows
        # Up to the next multiple, so that all processes get pieces of one size.
        if self.even and rows % count:
            batch = extend(batch, first, -rows % count)
            rows += -rows % count
        sizes = spread_out(rows, count)
        places = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        parts = [
            self.slice_fn(batch, place, process_index=rank, num_processes=count) if sizes[rank] else ABSENT
            for rank, place in enumerate(places)
        ]
        return Round(parts, Fill(real_in(real, sizes), sizes))

    def _rows(self, read: Read) -> int:
        if read.fill is not None:
            return read.fill.rows[0]
        return count_rows(read.batch) if self.size is None else self.size


def real_in(real: int, rows: Sequence[int]) -> tuple[int, ...]:
    """Divide the first `real` samples of a step over processes that have so many rows of it in turn."""
    starts = accumulate(rows[:-1], initial=0)
    return tuple(min(max(real - start, 0), size) for start, size in zip(starts, rows, strict=True))


def extend(batch: Any, source: Any, count: int) -> Any:
    """Append `count` rows from the start of `source`, repeated as needed, to a batch."""
    if count <= 0:
        return batch
    try:
        return concatenate([batch, resize(source, count_rows(source), count)])
    # What concatenating batches of unlike structure, types or shapes raises.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"The last batches of an epoch could not be padded to one size ({error}). Pass "
            "even_batches=False, or let the dataset give single samples and set batch_size on the loader."
        ) from error


def resize(batch: Any, rows: int, wanted: int) -> Any:
    """Return `wanted` rows of a batch of `rows`, from its start, repeated as needed."""
    if rows == wanted:
        return batch
    whole, part = divmod(wanted, rows)
    pieces = [batch] * whole + ([slice_tensors(batch, slice(0, part))] if part else [])
    return pieces[0] if len(pieces) == 1 else concatenate(pieces)
