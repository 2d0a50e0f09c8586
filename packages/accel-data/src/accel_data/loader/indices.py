"""Which samples a prepared loader yields: the indices of each batch, as its sampler yields them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from accel_data.loader.base import DataLoaderAdapter
from accel_data.order.samplers import AllShards


class IndexRecorder:
    """Records the indices of a loader's batches, in the order in which it hands them out.

    Args:
        loader: A prepared loader. One over a stream, and one that gets its batches from process 0, knows no
            indices.
    """

    def __init__(self, loader: DataLoaderAdapter) -> None:
        self._loader = loader
        self._recorded: deque[Any] = deque()
        self._replaced: tuple[str, Any] | None = None  # the sampler, until the first batch is read

    def start(self) -> None:
        """Record the iteration that begins now; nothing of it was read yet."""
        self.end()
        self._recorded.clear()
        loader = self._loader
        shard = loader._shard
        if shard is None or isinstance(shard, AllShards):
            return
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._replaced = name, getattr(loader, name)
        # Until the first batch alone: torch takes the sampler before, and users see theirs afterwards. Past
        # DataLoader.__setattr__, which raises for samplers once the loader is made.
        loader.__dict__[name] = _RecordingSampler(self._replaced[1], self._recorded)

    def end(self) -> None:
        """Put the loader's sampler back, if no batch was read."""
        if self._replaced is not None:
            name, sampler = self._replaced
            self._loader.__dict__[name] = sampler
            self._replaced = None

    def next(self) -> list[int] | None:
        """Return the indices of the next batch, once per batch; None where they are not known."""
        self.end()
        found = self._recorded.popleft() if self._recorded else None
        found = [found] if isinstance(found, int) else found
        if not isinstance(found, list) or not all(isinstance(item, int) for item in found):
            return None
        return found


class _RecordingSampler:
    """A sampler that records what it yields."""

    def __init__(self, sampler: Any, recorded: deque[Any]) -> None:
        self._sampler, self._recorded = sampler, recorded

    def __iter__(self) -> Iterator[Any]:
        # Started here, and not with the first index: a shard says how long its latest pass is.
        return self._record(iter(self._sampler))

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def _record(self, indices: Iterator[Any]) -> Iterator[Any]:
        for entry in indices:
            self._recorded.append(entry)
            yield entry
