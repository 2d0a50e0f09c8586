"""A progress bar of bytes for operations that take long."""

from __future__ import annotations

import threading
import time
from typing import Any

from accel_state.imports.packages import require

AFTER_S = 2.0
"""The seconds before the bar is shown."""

# A terminal over a network is slow, and there may be a thousand updates a second.
_EVERY_S = 0.1


class Progress:
    """Counts bytes, from any thread, and shows them as a tqdm bar after two seconds.

    tqdm is imported when the bar is first shown; without tqdm there is no bar.

    Args:
        label: The description of the bar.
        total: The total number of bytes; 0 if unknown.
        shown: Whether to show a bar; set on the main process.
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
            count: The number of bytes to add.
        """
        with self._lock:
            self.done += count
            now = time.monotonic()
            # Counted even before the bar is shown, so that it starts at the right place.
            if not self._shown or now < self._next:
                return
            self._next = now + _EVERY_S
            if self._bar is None:
                self._bar = self._open(now - self._start)
            if self._bar is not None:
                self._show()

    def close(self) -> None:
        """Close the bar."""
        with self._lock:
            self._shown = False
            if self._bar is not None:
                self._show()
                self._bar.close()
                self._bar = None

    def _show(self) -> None:
        self._bar.n = min(self.done, self.total or self.done)  # the last chunk of a file is not a full one
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
        bar.start_t -= passed_s  # so that the rate includes the time before it was shown
        return bar
