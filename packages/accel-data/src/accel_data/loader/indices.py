"""Records the sample indices of each batch of a prepared loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from accel_data.loader.base import DataLoaderAdapter
from accel_data.order.samplers import AllShards


class IndexRecorder:
    """Records the indices of a loader's batches, in the order in which it yields them.

    Args:
        loader: A prepared loader. A loader over a stream, and one that gets its batches from process 0, has
            no indices.
    """

    def __init__(self, loader: DataLoaderAdapter) -> None:
        self._loader = loader
        self._recorded: deque[Any] = deque()

    def begin(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Begin an iteration whose indices are recorded.

        Args:
            batches: The iterator, from which nothing was taken yet.

        Returns:
            Its batches.
        """
        self._recorded.clear()
        loader = self._loader
        shard = loader._shard
        if shard is None or isinstance(shard, AllShards):
            yield from batches
            return
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = getattr(loader, name)
        # Only for the first batch: torch takes the sampler there, and users see theirs afterwards. Bypass
        # DataLoader.__setattr__, which raises for samplers after __init__.
        loader.__dict__[name] = _RecordingSampler(sampler, self._recorded)
        try:
            first = next(batches, self)
        finally:
            loader.__dict__[name] = sampler
        if first is not self:
            yield first
            yield from batches

    def next(self) -> list[int] | None:
        """Return the indices of the next batch, once per batch; None if unknown."""
        indices = self._recorded.popleft() if self._recorded else None
        indices = [indices] if isinstance(indices, int) else indices
        if not isinstance(indices, list) or not all(isinstance(item, int) for item in indices):
            return None
        return indices


class _RecordingSampler:
    """A sampler that records what it yields."""

    def __init__(self, sampler: Any, split_items: deque[Any]) -> None:
        self._sampler, self._recorded = sampler, split_items

    def __iter__(self) -> Iterator[Any]:
        # Start here, not at the first index: this sets the shard's information about the epoch.
        return self._record(iter(self._sampler))

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def _record(self, indices: Iterator[Any]) -> Iterator[Any]:
        for entry in indices:
            self._recorded.append(entry)
            yield entry
