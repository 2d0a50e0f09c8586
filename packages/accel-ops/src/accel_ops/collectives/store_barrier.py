"""A barrier through the process group's store, for functions that some processes may never call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from accel_ops.debug.store import default_store, prefixed
from accel_state.process.info import ProcessInfo

_PAUSES_S = 0.001, 0.05  # between polls of the store: the first, and the longest


def store_barrier(
    process: ProcessInfo, what: str, patience_s: float, on_delay: Callable[[list[int]], None]
) -> None:
    """Wait until all processes call this. Collectives must follow before the next call.

    Not with a collective, which would match another one if a process does not come.

    Args:
        process: This process.
        what: The function that all have to call, for messages.
        patience_s: After how many seconds the main process calls `on_delay`.
        on_delay: Called with the ranks that have not come.

    Raises:
        RuntimeError: If a process does not come for as long as a collective would wait; it names it.
    """
    base = default_store() if process.world_size > 1 else None
    if base is None:
        return
    store: Any = prefixed("accel/barrier", base)
    limit_s = store.timeout.total_seconds()
    if process.is_main:
        missing = _wait_on_main(store, process, limit_s, patience_s, on_delay)
    else:
        missing = _wait_for_main(store, process.rank, limit_s)
    if missing:
        raise RuntimeError(
            f"process {process.rank} has waited for {limit_s:g} s in {what} for {_describe_ranks(missing)}. "
            "Call it on every process; or on the main process alone, with main_process_only=True."
        )


def _wait_on_main(
    store: Any, process: ProcessInfo, limit_s: float, patience_s: float, on_delay: Callable[[list[int]], None]
) -> list[int]:
    """Wait for the other ranks, and release them; return those that have not come."""
    ranks = range(1, process.world_size)
    impatient_at: float | None = time.monotonic() + patience_s
    for _ in polls(limit_s):
        if store.check([f"waits/{rank}" for rank in ranks]):
            for rank in ranks:
                store.set(f"go/{rank}", "")
            return []
        if impatient_at is not None and time.monotonic() > impatient_at:
            impatient_at = None
            on_delay(_missing(store, ranks))
    return _missing(store, ranks)


def _missing(store: Any, ranks: range) -> list[int]:
    return [rank for rank in ranks if not store.check([f"waits/{rank}"])]


def _wait_for_main(store: Any, rank: int, limit_s: float) -> list[int]:
    waits, go = f"waits/{rank}", f"go/{rank}"
    store.set(waits, "")
    for _ in polls(limit_s):
        if store.check([go]):
            store.delete_key(waits)  # before the collectives that follow, so before the next call
            store.delete_key(go)
            return []
    return [0]


def _describe_ranks(ranks: list[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def polls(seconds: float) -> Iterator[None]:
    """Yield at once, and then after growing pauses until the time is over.

    Args:
        seconds: The time, in seconds.
    """
    give_up_at = time.monotonic() + seconds
    pause, longest = _PAUSES_S
    yield
    while time.monotonic() < give_up_at:
        time.sleep(pause)
        pause = min(pause * 1.5, longest)
        yield
