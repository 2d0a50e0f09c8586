"""The batches that loops have read and no backward pass has used yet."""

from __future__ import annotations

from collections import deque
from typing import Any


class UnusedBatches:
    """Tells which batches a backward pass uses: one of each loader, in order, as loops may read ahead."""

    def __init__(self) -> None:
        self._passes = 0
        # By the id of each loader: the passes at its start, and its batches.
        self._unused: dict[int, tuple[int, deque[Any]]] = {}

    def start(self, loader: Any) -> None:
        """Iteration over a loader begins: what its last one left unused was not trained on."""
        self._unused[id(loader)] = self._passes, deque()

    def add(self, loader: Any, batch: Any) -> None:
        """A loader yields a batch.

        Args:
            loader: The loader.
            batch: What is to be kept of the batch.
        """
        if id(loader) in self._unused:
            self._unused[id(loader)][1].append(batch)

    def end(self, loader: Any) -> None:
        """Iteration over a loader ended: without a backward pass in it, its batches were only evaluated."""
        passes, _ = self._unused.get(id(loader), (None, None))
        if passes == self._passes:  # those that a loop has read ahead have their passes to come
            del self._unused[id(loader)]

    def use(self) -> list[Any]:
        """Return what was kept of the batches that a backward pass uses."""
        self._passes += 1
        used = []
        for _, batches in self._unused.values():
            if batches:
                used.append(batches.popleft())
        return used
