"""A clock that gives each moment to one part of the run: what it adds up to is the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from queue import SimpleQueue
from threading import RLock, get_ident
from time import perf_counter
from typing import Any

_STARTS = ("data", "forward", "backward")

PARTS = ("data", "forward", "backward", "optimizer", "collectives", "checkpoint", "other")
"""What time is spent on; "other" is the rest of the script.

"collectives" is also the wait for the gradients of other processes, under DDP.
"""

OWN_GRADIENTS_READY = "own gradients ready"
"""Noted in a backward pass: the rest of it is a wait for the others."""

MANY_NOTES = 10_000
"""Notes above which whoever takes one adds them up: a step leaves eight or nine."""


class Clock:
    """Adds up the time of each part, on the thread that made it. It starts with the first batch or pass.

    Where a part begins and ends that is noted alone, and added up later, all at once: a call of a Python
    function in a step costs about ten times as much as here, as the work around it has emptied the caches.
    What is timed in every step therefore takes its notes without a method of this class:
    `clock.note((part, clock.now(), get_ident()))`, and the same with None where the part ends.

    Args:
        synchronize: Called before the time is read, to wait for an accelerator; None not to wait.

    Attributes:
        note: Takes a note of three items: a part that begins, None for the end of the one that began last, or
            `OWN_GRADIENTS_READY`; the time; and the thread, as those of autograd and of loaders run beside
            the one whose time is divided here.
        now: Returns the time, in seconds.
        notes: What is not added up yet. Above `MANY_NOTES` call `add_up`.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        # Not a list: a compiler that looks into a forward method compiles it again for each length of one.
        self.notes: SimpleQueue[tuple[str | None, float, int]] = SimpleQueue()
        self.note = self.notes.put
        self.now = perf_counter if synchronize is None else self._awaited_now
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._parts = ["other"]  # those that have begun, the innermost last
        self._thread = get_ident()
        self._since: float | None = None
        self._lock = RLock()
        self._is_adding = False
        self._synchronize = synchronize

    @property
    def current(self) -> str:
        """The part that time goes to now."""
        self.add_up()
        return self._parts[-1]

    def begin(self, part: str) -> None:
        """Give the time from now on to a part, until `end` is called. Inside a checkpoint all time is its."""
        self._note(part)

    def end(self) -> None:
        """Give the time from now on to the part that had it before the one that began last."""
        self._note(None)

    def noting(self, what: str | None) -> Callable[[], None]:
        """Return what takes one note when it is called, without a call of a Python function."""
        notes = zip(repeat(what), iter(self.now, None), iter(get_ident, None))
        return map(self.note, notes).__next__

    def _note(self, what: str | None) -> None:
        if get_ident() == self._thread:
            self.note((what, self.now(), self._thread))
            if self.notes.qsize() > MANY_NOTES:
                self.add_up()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Give the time inside of the context to a part."""
        self.begin(part)
        try:
            yield
        finally:
            self.end()

    def read(self) -> dict[str, float]:
        """Return the seconds of each part up to now."""
        self.add_up()
        if self._since is not None:
            self._count_until(self.now())
        return dict(self._seconds)

    def add_up(self) -> None:
        """Turn the notes into seconds."""
        with self._lock:
            if self._is_adding:  # a signal's handler interrupted this
                return
            self._is_adding = True
            try:
                for _ in range(self.notes.qsize()):  # other threads may take notes meanwhile
                    what, time, thread = self.notes.get()
                    if thread == self._thread:
                        self._add(what, time)
            finally:
                self._is_adding = False

    def _add(self, what: str | None, time: float) -> None:
        parts = self._parts
        if self._since is not None:
            self._count_until(time)
        elif what in _STARTS and parts[-1] != "checkpoint":
            self._since = time
        if what is None:
            if len(parts) > 1:  # else it began before this was attached
                parts.pop()
        elif what != OWN_GRADIENTS_READY:
            parts.append("checkpoint" if parts[-1] == "checkpoint" else what)
        elif parts[-1] == "backward":
            parts[-1] = "collectives"

    def _count_until(self, time: float) -> None:
        assert self._since is not None
        self._seconds[self._parts[-1]] += time - self._since
        self._since = time

    def __reduce__(self) -> Any:
        return Clock, ()  # what is timed elsewhere begins anew

    def _awaited_now(self) -> float:
        if self._synchronize is not None and get_ident() == self._thread:
            self._synchronize()
        return perf_counter()
