"""A bar that shows bytes, once something takes long."""

from __future__ import annotations

import threading
import time
from typing import Any

from accel_state.imports.packages import require

AFTER_S = 2.0
"""How long nothing is shown (seconds)."""

# A terminal over a network is slow; chunks come a thousand times a second.
_EVERY_S = 0.1


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
        # Next time (monotonic seconds) at which the bar is drawn; the first is when it appears.
        self._next = self._start + AFTER_S
        self._bar: Any = None
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count bytes.

        Args:
            count: How many more are done.
        """
        with self._lock:
            self.done += count
            now = time.monotonic()
            # Counting goes on while nothing is shown, so that the bar starts with what is done already.
            if not self._shown or now < self._next:
                return
            self._next = now + _EVERY_S
            if self._bar is None:
                self._bar = self._open(now - self._start)
            if self._bar is not None:
                self._show()

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            self._shown = False
            if self._bar is not None:
                self._show()
                self._bar.close()
                self._bar = None

    def _show(self) -> None:
        self._bar.n = min(self.done, self.total or self.done)  # the last chunk of a file is not a whole one
        self._bar.refresh()

    def _open(self, passed_s: float) -> Any:
        try:
            bars = require("tqdm.auto", extra="progress")
        except ImportError:
            self._shown = False
            return None
        bar = bars.tqdm(
            total=self.total or None, desc=self.label, unit="B", unit_scale=True, unit_divisor=1024
        )
        bar.start_t -= passed_s  # so that the rate counts the time before it was shown
        return bar
