"""Waits, before a process group or the interpreter ends, until gloo has let go of the last tensors.

A thread of gloo that ends a collective drops its tensors after it has woken whoever waits for them, and needs
the interpreter's lock for that. Two things go wrong when it has not had it yet, in plain torch 2.13 scripts
too:

- The last reference to the group is dropped: its destructor waits for the thread and keeps the lock, and the
  process hangs.
- The interpreter is going down: the lock is not given any more, the thread is unwound in the middle of a
  destructor, and the process aborts ("terminate called without an active exception") although the script
  ended well.
"""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["settle"]

_THREAD = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")  # Linux; elsewhere there is the first short wait alone
_PAUSE_S = 0.001
_QUIET_LOOKS = 2  # in a row: between a look and the next the thread could take the lock, and did not want it


def settle(limit_s: float = 1.0) -> None:
    """Wait until no thread of gloo is at work.

    Args:
        limit_s: How long to wait at most, in seconds.
    """
    until = time.monotonic() + limit_s
    quiet = 0
    while quiet < _QUIET_LOOKS and time.monotonic() < until:
        time.sleep(_PAUSE_S)  # gives the lock to whoever waits for it
        quiet = 0 if _at_work() else quiet + 1


def _at_work() -> bool:
    return any(_is_running(task) for task in _TASKS.glob("*"))


def _is_running(task: Path) -> bool:
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # the thread has ended
        return False
    return name == _THREAD and rest.split()[0] in "RD"
