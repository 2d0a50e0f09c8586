"""Store calls with a timeout, made from a thread that may hang."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_R = TypeVar("_R")
_Call: TypeAlias = "tuple[Callable[[Store], Any], Future[Any]]"
_JOIN_S = 1.0


class StoreTimeoutError(RuntimeError):
    """The store did not answer in time."""


class TimeoutStore:
    """Calls a store with a timeout.

    Some calls of a store hang if the process that hosts it is stopped.

    Args:
        store: The store. It is called over its own connection if it can be cloned: a thread that waits in the
            store would block others.
    """

    def __init__(self, store: Store) -> None:
        try:
            self._store = store.clone()  # type: ignore[attr-defined]
        # Stores that are written in Python.
        except (RuntimeError, NotImplementedError):
            self._store = store
        self._calls: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._last: Future[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="accel-watchdog-store", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Store], _R], within_s: float) -> _R:
        """Call a function with the store.

        Args:
            function: Called in the thread of the store.
            within_s: The timeout, in seconds.

        Returns:
            What the function returns.

        Raises:
            StoreTimeoutError: If it does not return in time, or a previous call has not returned yet.
            RuntimeError: If the store is gone.
        """
        if self._last is not None and not self._last.done():
            raise StoreTimeoutError("no answer in time")
        future: Future[_R] = Future()
        self._last = future
        self._calls.put((function, future))
        try:
            return future.result(within_s)
        except FutureTimeout:
            raise StoreTimeoutError("no answer in time") from None

    def close(self) -> None:
        """End the thread, unless it hangs in the store."""
        self._calls.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            function, future = item
            try:
                future.set_result(function(self._store))
            except Exception as error:  # raised where the call is made
                future.set_exception(error)
            del item, function, future
