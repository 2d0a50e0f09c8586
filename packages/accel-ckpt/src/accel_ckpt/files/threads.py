"""A thread pool that starts all threads at once.

Python starts no threads when the interpreter is about to exit, and its executors accept no work then. A save
in the background may still run at that point, so its threads are started with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

_T = TypeVar("_T")
_Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Threads:
    """Threads that call submitted functions in order.

    Args:
        size: The number of threads.
        name: The prefix of their names.
    """

    def __init__(self, size: int, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(size):
                # Not daemons: one that is killed at exit would leave a partial file.
                thread = threading.Thread(target=self._work, name=f"{name}-{number}", daemon=False)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()  # started threads would wait forever
            raise

    def submit(self, function: Callable[..., _T], *args: Any) -> Future[_T]:
        """Submit a function.

        Args:
            function: The function to call.
            *args: Its arguments.

        Returns:
            The future of its result or error.
        """
        future: Future[_T] = Future()
        self._jobs.put((future, function, args))
        return future

    def close(self) -> None:
        """Wait until everything is done, and end the threads."""
        # One None for each thread; jobs before them in the queue are done first.
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def __enter__(self) -> Threads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, args = job
            try:
                future.set_result(function(*args))
            except BaseException as error:  # raised to the caller of `result`
                future.set_exception(error)
            # Otherwise these locals would keep the last job's tensors alive until the next job comes.
            del job, future, function, args
