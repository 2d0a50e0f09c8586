"""A bar that shows bytes, once something takes long."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from accel_state.imports import require

__all__ = ["Progress"]

AFTER_S = 2.0
"""How long nothing is shown (seconds)."""


class Progress:
    """Counts bytes, from any thread, and shows them as a tqdm bar when more than two seconds have passed.

    tqdm is imported when the bar is first shown; without it nothing is.

    Args:
        label: What is being done.
        total: How many bytes there will be; 0 where that is not known.
        shown: Whether there is a bar at all; on the main process.
    """

    def __init__(self, label: str, total: int = 0, shown: bool = False) -> None:
        self.label, self.total, self.done = label, total, 0
        self._shown = shown
        self._start = time.monotonic()
        self._bar: Any = None
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count bytes.

        Args:
            count: How many more are done.
        """
        with self._lock:
            self.done += count
            if not self._shown or time.monotonic() - self._start < AFTER_S:
                return
            if self._bar is None:
                self._bar = self._open()
            if self._bar is not None:
                self._bar.n = min(self.done, self.total or self.done)
                self._bar.refresh()

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            self._shown = False
            if self._bar is not None:
                self._bar.close()

    def _open(self) -> Any:
        with contextlib.suppress(ImportError):
            return require("tqdm.auto", extra="progress").tqdm(
                total=self.total or None, desc=self.label, unit="B", unit_scale=True, unit_divisor=1024
            )
        self._shown = False
        return None
