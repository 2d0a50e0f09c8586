"""Whether all processes call a function, or the main one alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import ref

import torch.distributed as dist

from accel_ops.debug.session import default_store, prefixed
from accel_state.logging.warning import user_frame
from accel_state.process.facts import Process

_PAUSES_S = 0.001, 0.05  # between looks into the store: the first, and the longest


@dataclass
class _Calls:
    """What a process knows of its calls.

    Args:
        at: How many it has made at each line.
        alone: The calls that this process, the main one, has made alone.
    """

    at: Counter[str] = field(default_factory=Counter)
    alone: set[str] = field(default_factory=set)

    def were_alone_at(self, line: str) -> bool:
        """Whether there was a call at a line that the main process made alone."""
        return any(call.rpartition("/")[0] == line for call in self.alone)


_known: tuple[ref[Any], _Calls] | None = None


def who_calls(process: Process, patience_s: float) -> Literal["all", "main", "main alone", "main before"]:
    """Find out whether all processes call a function, or the main one alone. Those that do call this.

    Not by a collective, which would pair with another one where a process does not come. The main process
    waits for the others at a line of the program until it has called there alone once.

    Args:
        process: This process.
        patience_s: How long the main process waits for the others, in seconds.

    Returns:
        "all" on all processes, if they come. Else "main alone" on the main process, or "main" if that was so
        before at this line, and "main before" on another one that comes when the main process has gone on.

    Raises:
        RuntimeError: If the main process does not come for as long as a collective would wait.
    """
    base = default_store() if process.world_size > 1 else None
    if base is None:
        return "all"
    store: Any = prefixed("accel/callers", base)
    calls = _calls_here()
    frame = user_frame()
    line = f"{frame.f_globals.get('__name__')}:{frame.f_lineno}"
    calls.at[line] += 1
    call = f"{line}/{calls.at[line]}"
    if not process.is_main:
        return "all" if _is_expected(store, process.rank, line, call) else "main before"
    # Where the main process has called alone, the others would have come, late, if this line were theirs too.
    known = calls.were_alone_at(line)
    waits = not known or store.check([f"late/{line}"])
    if _all_come(store, process, calls, patience_s if waits else 0.0):
        return "all"
    store.set(f"alone/{call}", "")
    calls.alone.add(call)
    return "main" if known else "main alone"


def _calls_here() -> _Calls:
    """Return the calls since the process group was made, whose store tells of them."""
    global _known
    group: Any = dist.group.WORLD
    if _known is None or _known[0]() is not group:
        _known = ref(group), _Calls()
    return _known[1]


def _all_come(store: Any, process: Process, calls: _Calls, patience_s: float) -> bool:
    """Wait for the others, and let them go on; return whether all have come."""
    keys = {rank: f"waits/{rank}" for rank in range(1, process.world_size)}
    for _ in _looks(patience_s):
        if not store.check(list(keys.values())):
            continue
        come = {rank: store.get(key).decode() for rank, key in keys.items()}
        if not calls.alone.intersection(come.values()):  # or one is about to leave, as it came too late
            for rank, call in come.items():
                store.set(f"go/{rank}/{call}", "")
            return True
    return False


def _is_expected(store: Any, rank: int, line: str, call: str) -> bool:
    """Wait for the main process; return whether it waits too, and has not made this call alone."""
    here, go, alone = f"waits/{rank}", f"go/{rank}/{call}", f"alone/{call}"
    store.set(here, call)
    limit_s = store.timeout.total_seconds()
    for _ in _looks(limit_s):
        if store.check([go]):
            store.delete_key(here)  # before the collectives that follow, so before the next call
            store.delete_key(go)
            return True
        if store.check([alone]):
            store.set(f"late/{line}", "")
            store.delete_key(here)
            return False
    raise RuntimeError(
        f"process {rank} waits at {line} for the main process, which has not come within {limit_s:g} s. What "
        "is called there has to be called on every process, or on the main one alone."
    )


def _looks(seconds: float) -> Iterator[None]:
    """Yield at once, and then after pauses until the time is over."""
    give_up_at = time.monotonic() + seconds
    pause, longest = _PAUSES_S
    yield
    while time.monotonic() < give_up_at:
        time.sleep(pause)
        pause = min(pause * 1.5, longest)
        yield
