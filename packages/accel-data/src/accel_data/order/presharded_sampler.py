"""Batch samplers over data that was divided among the processes before the loader got it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from accel_data.order.layout import Share, StepRows
from accel_data.order.samplers import BatchSamplerShard


class PresplitBatchSampler(BatchSamplerShard):
    """A batch sampler that gives the share of this process already.

    Args:
        batch_sampler: The batch sampler.
        splitter: What shares out: it, the sampler inside (a `DistributedSampler` or one like it), or the
            dataset.
        part: (index, number) of the process that this share is for.
        lengths: Length of the dataset of each process, if that is what is shared out and they are known.
        seed: See `BatchSamplerShard`.
    """

    def __init__(
        self,
        batch_sampler: Any,
        splitter: Any,
        part: tuple[int, int],
        lengths: tuple[int, ...] | None = None,
        seed: int | None = None,
    ) -> None:
        # Nothing is known of the batches of the others, unless all samples are dealt out in turn.
        deals = isinstance(splitter, DistributedSampler)
        super().__init__(batch_sampler, even_batches=deals, seed=seed)
        self.splitter = splitter
        self.deals = deals
        # Not num_processes: this wraps the batch sampler of one process, and cuts nothing.
        self.part = part
        self.num_parts = part[1]
        self.lengths = lengths

    @property
    def step_size(self) -> int:
        """Places in the global order that one step of all processes takes."""
        return (self.batch_size or 1) * self.num_parts

    @property
    def num_samples(self) -> int | None:
        """Length of the global order in samples, padding included; None where only a walk gives it."""
        return int(self.splitter.total_size) if self.deals else None

    @property
    def num_real(self) -> int | None:
        """Samples in the global order that are no padding; None where only a walk gives it."""
        if not self.deals:
            return None
        return min(int(self.splitter.total_size), len(self.splitter.dataset))

    @property
    def is_even(self) -> bool:
        """Whether every process gets as many batches, whatever the data."""
        return self.deals

    @property
    def batches_of_each(self) -> tuple[int, ...] | None:
        """Number of batches of each process in an epoch; None where it is not known."""
        if self.lengths is None or not self._flat:
            return None
        size = self.batch_size
        return tuple(length // size if self.drop_last else -(-length // size) for length in self.lengths)

    def _batches(self, share: Share, start: int) -> Iterator[list[int]]:
        # A start counts the samples of all processes, and this batch sampler gives those of one.
        first = start // self.num_parts
        last = self._fill_of_lengths() if self.lengths is not None else self._fill_of_dealt(first)
        for batch in super()._batches(share, first):
            share.last = last
            yield batch

    def _fill_of_lengths(self) -> StepRows | None:
        counts, lengths = self.batches_of_each, self.lengths
        if counts is None or lengths is None:
            return None
        steps, size = max(counts), self.batch_size
        # A process with a batch less than the others has none in the last step.
        rows = tuple(
            min(length - (steps - 1) * size, size) if count == steps else 0
            for length, count in zip(lengths, counts, strict=True)
        )
        return StepRows.of(rows, rows) if rows[self.part[0]] else None

    def _fill_of_dealt(self, first: int) -> StepRows | None:
        # A DistributedSampler deals its padded list out in turn: the last processes end with padding.
        if self.num_samples is None or self.num_real is None or self.sampler is not self.splitter:
            return None
        if not self._flat:
            return None
        processes = self.num_parts
        # The lists of all processes have one length, padding included, so their last batches are short
        # alike.
        short = (len(self.splitter) - first) % self.batch_size
        unpadded = processes - (self.num_samples - self.num_real)
        if unpadded == processes or (short and self.drop_last):
            return None
        rows = short or self.batch_size
        return StepRows(tuple(rows - (rank >= unpadded) for rank in range(processes)), (rows,) * processes)
