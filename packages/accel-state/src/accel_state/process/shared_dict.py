"""A dictionary shared by all instances of a class; one per thread where each thread has a device."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import Any


class ThreadLocalSharedDict(threading.local):
    """A class attribute that is one dictionary per thread, shared by the instances which live in the thread.

    Some TPU runtimes run one device per thread; what is shared inside one such "process" must not be shared
    between threads.

    Args:
        thread_local: Accepted for compatibility; the dictionary is per thread in any case.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[str, Any] = {}

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        # Called on class and on instance access: only the thread matters.
        return self._storage

    def __set__(self, instance: object, value: dict[str, Any]) -> None:
        self._storage = value


def shared_dict() -> Any:
    """Return a plain dictionary, or where torch_xla is installed a descriptor of one per thread."""
    # Not imported, which would start its runtime.
    return ThreadLocalSharedDict() if find_spec("torch_xla") is not None else {}
