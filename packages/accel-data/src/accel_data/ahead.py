"""Reading one batch ahead, in a thread, while the user works with the one before."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch

from accel_data.order import IsolatedRNG, global_states
from accel_state.devices import row

__all__ = ["RandomUse", "read_ahead"]


class _Step(Protocol):
    @property
    def last(self) -> bool: ...


T = TypeVar("T", bound=_Step)


class RandomUse:
    """Tells whether the global random generators have been used since this was made.

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


def read_ahead(read: Callable[[], T | None], device: torch.device) -> Generator[T, None, None]:
    """Call a function again and again, one call ahead of what is taken.

    The first call is made by the calling thread, which waits for it anyway. If it uses the global random
    generators, all are, each when it is its turn. Otherwise a thread makes the others. It ends with the
    generator, also when that is closed early: after the call that it is in.

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
    grad = torch.is_grad_enabled()

    def like_here() -> None:  # these are settings of a thread
        row(device).set_device(device.index)
        torch.set_grad_enabled(grad)

    # Not a daemon: the interpreter waits for the call that it is in, and then ends it.
    with ThreadPoolExecutor(1, "accel-data", like_here) as pool:
        while result is not None:
            future = None if result.last else pool.submit(read)
            yield result
            result = None if future is None else future.result()


def _in_turn(read: Callable[[], T | None], result: T | None) -> Generator[T, None, None]:
    while result is not None:
        yield result
        if result.last:
            return
        result = read()
