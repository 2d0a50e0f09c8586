"""Reading one batch ahead, in a thread, while the user works with the one before."""

from __future__ import annotations

import atexit
import pickle
import threading
import time
from collections.abc import Callable, Generator
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch

from accel_data.order.global_order import IsolatedRNG, global_states
from accel_state.devices.table import device_spec

_BRIEF_S = 0.0002
"""A step that is used no longer than this is done with before waking a thread has paid for itself."""


class _Step(Protocol):
    @property
    def last(self) -> bool: ...


_T = TypeVar("_T", bound=_Step)


class RandomUse:
    """Notices whether the global random generators have been used since this was made.

    What is read ahead of its turn must not touch them: what the user draws meanwhile would depend on it, and
    after a resume it would be drawn twice.
    """

    def __init__(self) -> None:
        self._before = self._now()

    def seen(self) -> bool:
        """Whether something was drawn, or the generators were set to something else for a while."""
        return self._now() != self._before

    def _now(self) -> list[int | bytes]:
        return [IsolatedRNG.entered, *map(_as_bytes, global_states())]


def _as_bytes(state: Any) -> bytes:
    # A pickled tensor does not always have the same bytes.
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


def read_ahead(read: Callable[[], _T | None], device: torch.device) -> Generator[_T, None, None]:
    """Call a function again and again, one call ahead of what is taken.

    The first call is made by the calling thread, which waits for it anyway. If it uses the global random
    generators, all are, each when it is its turn. Otherwise a thread makes the others, except for those after
    a result that was used for a moment only. It ends with the generator, also when that is closed early:
    after the call that it is in.

    Args:
        read: The function; None ends.
        device: The thread's current device.

    Yields:
        What it returns, to the one with `last`.
    """
    use = RandomUse()
    result = read()
    if result is None or result.last or use.seen():
        yield from _in_turn(read, result)
        return
    reader = _Reader(read, device)
    ahead = True
    try:
        while result is not None:
            if ahead and not result.last:
                reader.ask()
            given = time.perf_counter()
            yield result
            used_s = time.perf_counter() - given
            if result.last:
                return
            result = reader.take() if ahead else read()
            # Asked after each step: evaluation loops are brief, and training loops are not.
            ahead = used_s > _BRIEF_S
    finally:
        reader.close()


class _Reader(Generic[_T]):
    """A thread that makes one call whenever it is asked to.

    Two queues do what an executor's futures do in a quarter of the time.

    Args:
        read: What it calls.
        device: Its current device.
    """

    def __init__(self, read: Callable[[], _T | None], device: torch.device) -> None:
        self._read = read
        self._device = device
        # Of the thread that made this: a new thread starts with gradients on.
        self._grad = torch.is_grad_enabled()
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._done: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()
        # A daemon: the interpreter does not wait for it for ever, but asks it to end (see _close_all).
        self._thread = threading.Thread(target=self._run, name="accel-data", daemon=True)
        self._thread.start()
        _open.add(self)

    def ask(self) -> None:
        """Let it make the next call."""
        self._asked.put(True)

    def take(self) -> _T | None:
        """Wait for what the call returns, or raise what it raises."""
        result, error = self._done.get()
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error  # its traceback has this frame, which would keep it and all frames alive

    def close(self) -> None:
        """End the thread, after the call that it is in."""
        self._asked.put(False)
        self._thread.join()
        _open.discard(self)

    def _run(self) -> None:
        device_spec(self._device).set_device(self._device.index)  # these two are settings of a thread
        torch.set_grad_enabled(self._grad)
        while self._asked.get():
            self._done.put(self._attempt())

    def _attempt(self) -> tuple[_T | None, BaseException | None]:
        try:
            return self._read(), None
        except BaseException as error:  # it belongs to who takes the result
            return None, error


_open: WeakSet[_Reader[Any]] = WeakSet()


@atexit.register
def _close_all() -> None:
    # A loop that ended with an exception may still be open. Its thread must not be cut off inside of torch.
    for reader in list(_open):
        reader.close()


def _in_turn(read: Callable[[], _T | None], result: _T | None) -> Generator[_T, None, None]:
    while result is not None:
        yield result
        if result.last:
            return
        result = read()
