"""Groups the batches that process 0 reads into steps: one batch per rank.

Batches are read and collated separately for each rank, so that nothing has to be sliced or concatenated. Rows
are split here only for a user's slicing function, or if the dataset yields batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from typing import Any, NamedTuple

from accel_data.dispatch.channel import NO_BATCH
from accel_data.order.layout import StepRows, split_evenly
from accel_data.stream.dataset import count_rows
from accel_ops.trees.tensors import concatenate, slice_tensors


class ReadBatch(NamedTuple):
    """A batch that process 0 has read.

    Args:
        batch: The batch.
        step_rows: Its sizes, as of one rank; None if it is full and without padding.
    """

    batch: Any
    step_rows: StepRows | None


class Step(NamedTuple):
    """One step of all ranks.

    Args:
        batches: The batch of each rank; `NO_BATCH` for a rank that has none.
        step_rows: Their sizes; may be None if every rank has a full batch.
    """

    batches: list[Any]
    step_rows: StepRows | None


@dataclass(frozen=True)
class StepBuilder:
    """Makes steps of batches.

    Args:
        num_processes: Number of ranks.
        size: Samples of each batch of a rank; None if the dataset yields batches of any size.
        even_batches: Give every rank a batch in each step, by repeating the first ones of the epoch; if
            batches are sliced, slices of equal size, by repeating rows of the batch.
        drop_last: Drop an incomplete last step.
        slice_fn: Slices the batch of one rank out of a global batch; None if each batch is for one rank.
    """

    num_processes: int
    size: int | None
    even_batches: bool
    drop_last: bool
    slice_fn: Callable[..., Any] | None

    def of(self, reads: Iterator[ReadBatch]) -> Iterator[Step]:
        """Make steps of the batches that are read.

        Args:
            reads: One batch per rank and step; or one per step, if there is a slicing function.

        Yields:
            The steps.
        """
        # Padding comes from the start of the epoch, as in a loader that every rank reads itself.
        head: list[ReadBatch] = []
        count = 1 if self.slice_fn else self.num_processes
        while step_batches := list(islice(reads, count)):
            head = head or step_batches
            if self.slice_fn is not None:
                yield self._sliced(step_batches[0])
            elif len(step_batches) == count or not self.drop_last:
                yield self._one_batch_each(step_batches, head)

    def _one_batch_each(self, step_batches: list[ReadBatch], head: list[ReadBatch]) -> Step:
        batches = [read.batch for read in step_batches]
        rows = [self._rows(read) for read in step_batches]
        missing = self.num_processes - len(batches)
        if not self.even_batches:
            if not missing:
                return Step(batches, None)
            rows += [0] * missing
            return Step(batches + [NO_BATCH] * missing, StepRows(tuple(rows), tuple(rows)))
        # A batch of the dataset is either all real or all padding.
        real = [
            size if read.step_rows is None else read.step_rows.real[0] * (size if self.size is None else 1)
            for size, read in zip(rows, step_batches, strict=True)
        ]
        # A rank without a batch gets one that is only padding, as every rank must take this step.
        padding = list(islice(cycle(head), missing))
        batches += [read.batch for read in padding]
        return Step(batches, StepRows.of(real + [0] * missing, rows + [self._rows(read) for read in padding]))

    def _sliced(self, read: ReadBatch) -> Step:
        assert self.slice_fn is not None
        batch, count = read.batch, self.num_processes
        rows = count_rows(batch)
        real = read.step_rows.real[0] if read.step_rows else rows
        # Up to the next multiple, so that all ranks get slices of equal size.
        if self.even_batches and rows % count:
            batch = repeat_rows(batch, rows, rows + -rows % count)
            rows += -rows % count
        sizes = split_evenly(rows, count)
        places = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        batches = [
            self.slice_fn(batch, place, process_index=rank, num_processes=count) if sizes[rank] else NO_BATCH
            for rank, place in enumerate(places)
        ]
        return Step(batches, StepRows(split_real_rows(real, sizes), sizes))

    def _rows(self, read: ReadBatch) -> int:
        if self.size is None:
            return count_rows(read.batch)
        return self.size if read.step_rows is None else read.step_rows.rows[0]


def split_real_rows(real: int, rows: Sequence[int]) -> tuple[int, ...]:
    """Split the first `real` samples of a step over ranks with these numbers of rows."""
    starts = accumulate(rows[:-1], initial=0)
    return tuple(min(max(real - start, 0), size) for start, size in zip(starts, rows, strict=True))


def repeat_rows(batch: Any, rows: int, wanted: int) -> Any:
    """Repeat the rows of a batch, from its start, up to the wanted number."""
    full, rest = divmod(wanted, rows)
    try:
        return concatenate([batch] * full + ([slice_tensors(batch, slice(0, rest))] if rest else []))
    # Raised by concatenating incompatible types.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"split_batches=True cannot pad a batch of {rows} rows to {wanted}, so that all processes get "
            f"slices of equal size ({error}). Pass even_batches=False, or split_batches=False."
        ) from error
