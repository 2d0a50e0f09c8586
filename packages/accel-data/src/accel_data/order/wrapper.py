"""Base class of batch samplers that wrap another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler


class BatchSamplerWrapper(BatchSampler):
    """A batch sampler that wraps another one of any class.

    Args:
        batch_sampler: The batch sampler; any iterable of lists of indices.
    """

    # Skip BatchSampler.__init__, which takes a sampler and checks its class.
    def __init__(self, batch_sampler: BatchSampler | Iterable[list[int]]) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler inside the batch sampler; None if it has none."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        """Number of batches of the wrapped batch sampler."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also for the samplers inside.

        Args:
            epoch: Its number, from 0.
        """
        for inner in (self.batch_sampler, self.sampler):
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)


class FirstBatches(BatchSamplerWrapper):
    """The first batches of a batch sampler, or entries of a sampler, which may be infinite.

    Args:
        batch_sampler: The batch sampler, or sampler.
        number: How many, at most.
    """

    def __init__(self, batch_sampler: BatchSampler | Iterable[Any], number: int) -> None:
        super().__init__(batch_sampler)
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), len(self))

    def __len__(self) -> int:
        try:
            return min(self.number, self.total_length)
        except (TypeError, AttributeError):  # it has no __len__, or inherits one that does not work
            return self.number
