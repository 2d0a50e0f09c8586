"""Reading one batch ahead, in a thread, while the user works with the previous one."""

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
"""Waking a thread does not pay off for steps shorter than this (seconds)."""


class _Step(Protocol):
    @property
    def last(self) -> bool: ...


_T = TypeVar("_T", bound=_Step)


class RandomUse:
    """Detects whether the global random generators have been used since this was made.

    Reading ahead must not use them: what the user draws meanwhile would depend on it, and after a resume it
    would be drawn twice.
    """

    def __init__(self) -> None:
        self._before = self._now()

    def seen(self) -> bool:
        """Whether something was drawn, or the generators were temporarily reseeded."""
        return self._now() != self._before

    def _now(self) -> list[int | bytes]:
        return [IsolatedRNG.times_entered, *map(_as_bytes, global_states())]


def _as_bytes(state: Any) -> bytes:
    # A pickled tensor does not always have the same bytes.
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


def read_ahead(read: Callable[[], _T | None], device: torch.device) -> Generator[_T, None, None]:
    """Call a function repeatedly, one call ahead of what is consumed.

    The first call is made in the calling thread, which waits for it anyway. If it uses the global random
    generators, all others are too, each when it is requested. Otherwise a thread makes the other calls,
    except after a result that was used only briefly. The thread ends with the generator, also if that is
    closed early, after its current call.

    Args:
        read: The function; None ends the iteration.
        device: The thread's current device.

    Yields:
        What it returns, up to the result with `last`.
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
                reader.request()
            yielded_at = time.perf_counter()
            yield result
            used_s = time.perf_counter() - yielded_at
            if result.last:
                return
            result = reader.take() if ahead else read()
            # Decided at each step: steps of evaluation loops are short, those of training loops are not.
            ahead = used_s > _BRIEF_S
    finally:
        reader.close()


class _Reader(Generic[_T]):
    """A thread that makes one call per request.

    Two queues do what an executor's futures do in a quarter of the time.

    Args:
        read: The function to call.
        device: Its current device.
    """

    def __init__(self, read: Callable[[], _T | None], device: torch.device) -> None:
        self._read = read
        self._device = device
        # That of the creating thread: a new thread starts with gradients enabled.
        self._grad = torch.is_grad_enabled()
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._done: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()
        # A daemon: the interpreter does not wait for it forever, but ends it in _close_all.
        self._thread = threading.Thread(target=self._run, name="accel-data", daemon=True)
        self._thread.start()
        _open.add(self)

    def request(self) -> None:
        """Request the next call."""
        self._requests.put(True)

    def take(self) -> _T | None:
        """Wait for the result of the call; raise its error."""
        result, error = self._done.get()
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error  # its traceback has this frame, which would keep all frames alive

    def close(self) -> None:
        """End the thread after its current call."""
        self._requests.put(False)
        self._thread.join()
        _open.discard(self)

    def _run(self) -> None:
        device_spec(self._device).set_device(self._device.index)  # both settings are per thread
        torch.set_grad_enabled(self._grad)
        while self._requests.get():
            self._done.put(self._attempt())

    def _attempt(self) -> tuple[_T | None, BaseException | None]:
        try:
            return self._read(), None
        except BaseException as error:  # raised by take()
            return None, error


_open: WeakSet[_Reader[Any]] = WeakSet()


@atexit.register
def _close_all() -> None:
    # A loop that ended with an exception may still be open. Its thread must not be killed inside torch.
    for reader in list(_open):
        reader.close()


def _in_turn(read: Callable[[], _T | None], result: _T | None) -> Generator[_T, None, None]:
    while result is not None:
        yield result
        if result.last:
            return
        result = read()
