"""A thread that reports where its process is, while the process itself is busy."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from accel_ops.debug.stack import describe_location

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_EVERY_S = 0.1
_JOIN_S = 1.0  # it may hang in a store that does not answer
# Other ranks ask only after waiting longer than this, so until then the store is not polled.
_QUIET_S = 3.0


class Monitor:
    """A daemon thread that answers other processes' requests, and detects the end of the process group.

    Args:
        store: The store for requests and answers.
        rank: Rank of this process.
        is_over: Polled; returns whether the thread is no longer needed.
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
        """Record that the calling thread has reached an operation; the first call starts the thread."""
        # The communicating thread, which need not be the main one.
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
                request = int(self._store.get(f"ask/{self._rank}"))
                # Requests are numbered: an old answer shows where the process was, not where it is.
                if request > self._answered:
                    self._answered = request
                    text = f"is at {describe_location(self._watched)}"
                    self._store.set(f"where/{self._rank}", json.dumps([request, text]))
        except (RuntimeError, OSError):  # the store is gone
            return False
        return True
