"""Which samples a prepared loader hands out: the indices of each batch, noted as its sampler gives them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from accel_data.loader.base import DataLoaderAdapter
from accel_data.order.samplers import AllShards


class IndexRecorder:
    """Notes the indices of a loader's batches, in the order in which it hands them out.

    Args:
        loader: A prepared loader. One over a stream, and one that gets its batches from process 0, knows no
            indices.
    """

    def __init__(self, loader: DataLoaderAdapter) -> None:
        self._loader = loader
        self._noted: deque[Any] = deque()

    def begin(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Begin a pass whose indices are noted.

        Args:
            batches: The iterator of the pass, from which nothing was taken yet.

        Returns:
            Its batches.
        """
        self._noted.clear()
        loader = self._loader
        shard = loader._shard
        if shard is None or isinstance(shard, AllShards):
            yield from batches
            return
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = getattr(loader, name)
        # For the first batch alone: torch takes the sampler there, and users see theirs afterwards. Past
        # DataLoader.__setattr__, which raises for samplers once the loader is made.
        loader.__dict__[name] = _Noting(sampler, self._noted)
        try:
            first = next(batches, self)
        finally:
            loader.__dict__[name] = sampler
        if first is not self:
            yield first
            yield from batches

    def next(self) -> list[int] | None:
        """Return the indices of the next batch, once per batch; None where they are not known."""
        found = self._noted.popleft() if self._noted else None
        found = [found] if isinstance(found, int) else found
        if not isinstance(found, list) or not all(isinstance(item, int) for item in found):
            return None
        return found


class _Noting:
    """A sampler that notes what it gives."""

    def __init__(self, sampler: Any, noted: deque[Any]) -> None:
        self._sampler, self._noted = sampler, noted

    def __iter__(self) -> Iterator[Any]:
        # Begun here, and not with the first index: a shard says of its latest pass how long it is.
        return self._note(iter(self._sampler))

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def _note(self, indices: Iterator[Any]) -> Iterator[Any]:
        for entry in indices:
            self._noted.append(entry)
            yield entry
