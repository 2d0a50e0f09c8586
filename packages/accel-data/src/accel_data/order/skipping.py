"""A batch sampler that skips its first batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler

from accel_data.checks import check_skip
from accel_data.order.global_order import SeedableRandomSampler, can_seek, order_of, walk
from accel_data.order.samplers import BatchSamplerShard
from accel_data.order.wrapper import BatchSamplerWrapper


class SkipBatchSampler(BatchSamplerWrapper):
    """A batch sampler without its first batches.

    Args:
        batch_sampler: The batch sampler.
        skip_batches: Number of batches to skip.
    """

    def __init__(self, batch_sampler: BatchSampler | Iterable[list[int]], skip_batches: int = 0) -> None:
        super().__init__(batch_sampler)
        self.skip_batches = check_skip(skip_batches)

    def __iter__(self) -> Iterator[Any]:
        inner: Any = self.batch_sampler
        is_flat = type(inner).__iter__ is BatchSampler.__iter__
        if not self.skip_batches or not can_seek(inner.sampler if is_flat else inner):
            return islice(iter(inner), self.skip_batches, None)
        return self._seek_batches() if is_flat else self._seek(inner)

    def _seek_batches(self) -> Iterator[list[int]]:
        """Seek to the first batch that is not skipped."""
        full = BatchSamplerShard(self.batch_sampler)
        full.set_start(self.skip_batches * full.step_size)
        yield from full
        _end_epoch(self.sampler)

    def _seek(self, sampler: Any) -> Iterator[int]:
        yield from walk(order_of(sampler, None, 0), self.skip_batches)
        _end_epoch(sampler)

    def __len__(self) -> int:
        return max(self.total_length - self.skip_batches, 0)


def _end_epoch(sampler: Any) -> None:
    """Advance a sampler to the next epoch, as a complete iteration does."""
    if isinstance(sampler, SeedableRandomSampler):
        sampler.set_epoch(sampler.epoch + 1)
