"""Saying where a process is: a thread that answers, while the process itself is busy elsewhere."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from accel_ops.debug.stack import whereabouts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_EVERY_S = 0.1
_JOIN_S = 1.0  # it may hang in a store that does not answer
# Nobody asks before having waited longer than this, so until then the store is left in peace.
_QUIET_S = 3.0


class Monitor:
    """A daemon thread that answers other processes' questions, and notices the end of the process group.

    Args:
        store: Where questions and answers are written.
        rank: Rank of this process.
        is_over: Called again and again; returns whether the thread is needed no longer.
    """

    def __init__(self, store: Store, rank: int, is_over: Callable[[], bool]) -> None:
        self._store = store
        self._rank = rank
        self._is_over = is_over
        self._answered = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._watched = 0
        self._since = 0.0

    def watch(self) -> None:
        """Note that the calling thread has just come to an operation; the first call starts the thread."""
        # The thread that communicates, which need not be the main one.
        self._watched = threading.get_ident()
        self._since = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(self._stop,), name="accel-check-collectives", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread; `watch` starts another one."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join(_JOIN_S)
            self._stop = threading.Event()
            self._thread = None

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(_EVERY_S):
            if self._is_over() or (time.monotonic() - self._since > _QUIET_S and not self._answer()):
                return

    def _answer(self) -> bool:
        try:
            if self._store.check([f"ask/{self._rank}"]):
                asked = int(self._store.get(f"ask/{self._rank}"))
                # Questions are numbered: an answer to an earlier one says where
                # the process was, not where it is.
                if asked > self._answered:
                    self._answered = asked
                    text = f"is at {whereabouts(self._watched)}"
                    self._store.set(f"where/{self._rank}", json.dumps([asked, text]))
        except (RuntimeError, OSError):  # the store is gone, and with it those who might ask
            return False
        return True
