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

import atexit
import sys
import time
from pathlib import Path

_THREAD = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")  # Linux; elsewhere there is the first short wait alone
_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
_PAUSE_S = _INTERVAL_S = 0.001


def drain_gloo(limit_s: float = 5.0) -> None:
    """Wait until no thread of gloo is at work, or waits for the interpreter's lock.

    A thread that waits for the lock sleeps as an idle one does, but wakes once in each switch interval (which
    is short meanwhile) to ask for it. So the threads are idle if none has woken while this one kept the lock
    for several of them: also on a machine so busy that a thread which is given the lock does not run at once.

    Args:
        limit_s: How long to wait at most, in seconds.
    """
    until = time.monotonic() + limit_s
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_INTERVAL_S)
    try:
        time.sleep(_PAUSE_S)  # gives the lock to whoever waits for it, and it asks anew from now on
        before = _wakings()
        while before and time.monotonic() < until:
            _keep_lock(4 * _INTERVAL_S)
            now = _wakings()
            if now == before and not any(state in "RD" for state, _ in now.values()):
                return
            time.sleep(_PAUSE_S)
            before = _wakings()
    finally:
        sys.setswitchinterval(interval)


def drain_at_exit() -> None:
    """Have `drain_gloo` called when the interpreter ends; several times the same counts once."""
    atexit.unregister(drain_gloo)
    atexit.register(drain_gloo)


def _keep_lock(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _wakings() -> dict[str, tuple[str, int]]:
    """By thread of gloo: its state, and how often it has run and stopped."""
    found = {}
    for task in _TASKS.glob("*"):
        try:
            if (task / "comm").read_text().strip() != _THREAD:
                continue
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        except OSError:  # the thread has ended
            continue
        # Not every system counts them; the state alone says less.
        switches = sum(int(status.get(name, 0)) for name in _SWITCHES)
        found[task.name] = status["State"].split()[0], switches
    return found
