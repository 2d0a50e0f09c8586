"""A clock that gives each moment to one part of the run: what it adds up to is the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter

_STARTS = ("data", "forward", "backward")

PARTS = ("data", "forward", "backward", "optimizer", "collectives", "checkpoint", "other")
"""What time is spent on; "other" is the rest of the script.

"collectives" is also the wait for the gradients of other processes, under DDP.
"""


class Clock:
    """Adds up the time of each part, on the thread that made it. It starts with the first batch or pass.

    Args:
        synchronize: Called before the time is read, to wait for an accelerator; None not to wait.

    Attributes:
        seconds: Seconds of each part so far.
        current: The part that time goes to now.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.current = "other"
        self._thread = get_ident()
        self._since: float | None = None
        self._is_held = False
        self._synchronize = synchronize

    def switch(self, part: str | None) -> str | None:
        """Give the time from now on to a part.

        Args:
            part: The part, or what an earlier call has returned, to give the time back: None changes nothing.

        Returns:
            The part that had it; None where nothing was changed: on another thread, inside of `only`, or
            before the training began.
        """
        # Threads of autograd and of loaders run beside this one, whose time is divided here.
        if part is None or self._is_held or get_ident() != self._thread:
            return None
        if self._synchronize is not None:
            self._synchronize()
        now, since, before = perf_counter(), self._since, self.current
        if since is not None:
            self.seconds[before] += now - since
        elif part not in _STARTS:
            return None
        self._since, self.current = now, part
        return before

    @contextmanager
    def only(self, part: str) -> Iterator[None]:
        """Give all the time inside of the context to a part, whatever else is timed there."""
        before = self.switch(part)
        if before is None:
            yield
            return
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self.switch(before)

    def read(self) -> dict[str, float]:
        """Return the seconds of each part up to now."""
        if self._since is not None:
            self.switch(self.current)
        return dict(self.seconds)
