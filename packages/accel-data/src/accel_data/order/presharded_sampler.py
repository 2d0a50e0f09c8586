"""Batch samplers over data that was sharded before the loader was prepared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from accel_data.order.layout import EpochInfo, StepRows
from accel_data.order.samplers import BatchSamplerShard


class PreshardedBatchSampler(BatchSamplerShard):
    """A batch sampler that already yields the shard of this process.

    Args:
        batch_sampler: The batch sampler.
        source: What shards the data: the batch sampler, its sampler (a `DistributedSampler` or a similar
            one), or the dataset.
        pre_shard: (index, number) of the process that this shard is for.
        lengths: Length of the dataset of each rank, if the dataset is sharded and the lengths are known.
        seed: See `BatchSamplerShard`.
    """

    def __init__(
        self,
        batch_sampler: Any,
        source: Any,
        pre_shard: tuple[int, int],
        lengths: tuple[int, ...] | None = None,
        seed: int | None = None,
    ) -> None:
        # The batches of other ranks are unknown, except for a DistributedSampler.
        is_distributed_sampler = isinstance(source, DistributedSampler)
        super().__init__(batch_sampler, even_batches=is_distributed_sampler, seed=seed)
        self.source = source
        self.is_distributed_sampler = is_distributed_sampler
        # Not num_processes: this wraps the batch sampler of one rank, and splits nothing.
        self.pre_shard = pre_shard
        self.num_shards = pre_shard[1]
        self.lengths = lengths

    @property
    def step_size(self) -> int:
        """Samples of one step over all ranks."""
        return (self.batch_size or 1) * self.num_shards

    @property
    def num_samples(self) -> int | None:
        """Length of the global order in samples, padding included; None if only iterating shows it."""
        return int(self.source.total_size) if self.is_distributed_sampler else None

    @property
    def num_real_samples(self) -> int | None:
        """Samples in the global order without padding; None if only iterating shows it."""
        if not self.is_distributed_sampler:
            return None
        return min(int(self.source.total_size), len(self.source.dataset))

    @property
    def is_even(self) -> bool:
        """Whether every rank gets equally many batches, whatever the data."""
        return self.is_distributed_sampler

    @property
    def batches_per_rank(self) -> tuple[int, ...] | None:
        """Number of batches of each rank in an epoch; None if unknown."""
        if self.lengths is None or not self._is_plain_batch_sampler:
            return None
        size = self.batch_size
        return tuple(length // size if self.drop_last else -(-length // size) for length in self.lengths)

    def _batches(self, info: EpochInfo, start: int) -> Iterator[list[int]]:
        # A start counts the samples of all ranks, and this batch sampler yields those of one.
        first = start // self.num_shards
        last = (
            self._last_rows_from_lengths() if self.lengths is not None else self._last_rows_of_sampler(first)
        )
        for batch in super()._batches(info, first):
            info.last_rows = last
            yield batch

    def _last_rows_from_lengths(self) -> StepRows | None:
        counts, lengths = self.batches_per_rank, self.lengths
        if counts is None or lengths is None:
            return None
        steps, size = max(counts), self.batch_size
        # A rank with one batch fewer has none in the last step.
        rows = tuple(
            min(length - (steps - 1) * size, size) if count == steps else 0
            for length, count in zip(lengths, counts, strict=True)
        )
        return StepRows.of(rows, rows) if rows[self.pre_shard[0]] else None

    def _last_rows_of_sampler(self, first: int) -> StepRows | None:
        # A DistributedSampler deals its padded list out in turn: the last ranks end with padding.
        if self.num_samples is None or self.num_real_samples is None or self.sampler is not self.source:
            return None
        if not self._is_plain_batch_sampler:
            return None
        processes = self.num_shards
        # The lists of all ranks have the same length, padding included, and so have their last batches.
        short = (len(self.source) - first) % self.batch_size
        unpadded = processes - (self.num_samples - self.num_real_samples)
        if unpadded == processes or (short and self.drop_last):
            return None
        rows = short or self.batch_size
        return StepRows(tuple(rows - (rank >= unpadded) for rank in range(processes)), (rows,) * processes)
