"""A clock that assigns each moment to one section of the run: the sections add up to all of it."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import get_ident
from time import perf_counter
from typing import Any

SECTIONS = ("data", "forward", "backward", "optimizer", "collectives", "checkpoint", "other")
"""What time is spent on; "other" is the rest of the script.

"collectives" is the wait for other ranks: for their gradients under DDP, and for batches that the main
process reads for all.
"""

MANY_NOTES = 10_000
"""Notes above which hooks add them up: a step leaves eight."""


class Clock:
    """Adds up the time of each part, on the thread that made it. It starts with the first batch or pass.

    When a part begins or ends, that is only noted, and added up later: a call of Python in a step costs about
    ten times as much as here, as the work around it has emptied the caches. What is timed in every step
    therefore takes its notes itself: `clock.note((part, is_begin, clock.now(), get_ident()))`.

    Args:
        now: Returns the time, in seconds.

    Attributes:
        note: Takes a note: a part; whether it begins, or ends; the time; and the thread.
        now: Returns the time, in seconds.
        seconds: By part, what was added up.
    """

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        # Not a list: a compiler that looks into a forward method compiles it again for each length of one.
        self.notes: SimpleQueue[tuple[str, bool, float, int]] = SimpleQueue()
        self.note = self.notes.put
        self.now = now
        self.seconds = dict.fromkeys(SECTIONS, 0.0)
        self._open = ["other"]  # those that have begun, the innermost last
        self._thread = get_ident()
        self._since: float | None = None
        self._is_adding = False

    def note_hook(self, section: str, begins: bool, *_: Any) -> None:
        """Take a note in a hook of a module."""
        self.note((section, begins, self.now(), get_ident()))
        if self.notes.qsize() > MANY_NOTES:
            self.add_up()

    def read(self) -> dict[str, float]:
        """Return the seconds of each part up to now."""
        self.add_up()
        self._count_until(self.now())
        return dict(self.seconds)

    def add_up(self) -> None:
        """Turn the notes into seconds."""
        if self._is_adding:  # a signal's handler interrupted this
            return
        self._is_adding = True
        for _ in range(self.notes.qsize()):
            section, begins, time, thread = self.notes.get()
            if thread == self._thread:
                self._add(section, begins, time)
        self._is_adding = False

    def _add(self, section: str, begins: bool, time: float) -> None:
        sections = self._open
        self._count_until(time)
        is_first = begins and section in ("data", "forward", "backward") and "checkpoint" not in sections
        self._since = time if is_first and self._since is None else self._since
        # A section ends once; one that an error has left open ends when it begins again. A model may call
        # another.
        if section in sections and not (begins and section in ("forward", "checkpoint")):
            del sections[len(sections) - 1 - sections[::-1].index(section) :]
        if begins:
            sections.append(section)

    def _count_until(self, time: float) -> None:
        if self._since is not None:
            # All time in a checkpoint is the checkpoint's.
            section = "checkpoint" if "checkpoint" in self._open else self._open[-1]
            self.seconds[section] += time - self._since
            self._since = time

    def __reduce__(self) -> tuple[type[Clock], tuple[()]]:
        return Clock, ()  # copies of a model are timed by no clock of this run
