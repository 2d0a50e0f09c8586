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
import threading
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from accel_state.imports.packages import is_torch_version

_THREAD = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")  # Linux; elsewhere there is the first short wait alone
_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
_PAUSE_S = _INTERVAL_S = 0.001
_POLL_S = 0.01  # how often a thread of gloo polls the network


class _Thread(NamedTuple):
    """What the system says of a thread: name, letter of its state, how often it has run and stopped; when."""

    name: str
    state: str
    wakings: int
    read_at: float


def wait_for_gloo_threads(limit_s: float = 5.0) -> None:
    """Wait until no thread of gloo is at work, or waits for the interpreter's lock.

    A thread that waits for the lock sleeps as an idle one does, but wakes once in each switch interval (which
    is short meanwhile) to ask for it. So the threads are idle if none has woken while this one kept the lock
    for several of them: also on a machine so busy that a thread which is given the lock does not run at once.

    Args:
        limit_s: How long to wait at most, in seconds.
    """
    until = time.monotonic() + limit_s
    # Threads without a name may poll, so that it takes several wakings to know one that waits.
    intervals = 4 if _are_named() else 8
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_INTERVAL_S)
    try:
        time.sleep(_PAUSE_S)  # gives the lock to whoever waits for it, and it asks anew from now on
        before = _threads_of_gloo()
        while before and time.monotonic() < until:
            _keep_lock(intervals * _INTERVAL_S)
            now = _threads_of_gloo()
            if not _at_work(before, now):
                return
            time.sleep(_PAUSE_S)
            before = _threads_of_gloo()
    finally:
        sys.setswitchinterval(interval)


def wait_for_gloo_threads_at_exit() -> None:
    """Have `wait_for_gloo_threads` called when the interpreter ends; several times the same counts once."""
    atexit.unregister(wait_for_gloo_threads)
    atexit.register(wait_for_gloo_threads)


def _keep_lock(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _at_work(before: dict[str, _Thread], now: dict[str, _Thread]) -> bool:
    """Whether a thread runs, waits for a processor or the disk, or has woken more often than an idle one."""
    if before.keys() != now.keys() or any(thread.state in "RD" for thread in now.values()):
        return True
    return any(
        thread.wakings - before[task].wakings > _polls(thread.read_at - before[task].read_at)
        for task, thread in now.items()
    )


def _polls(seconds: float) -> int:
    """How often an idle thread may wake: those with the name do not poll."""
    return 0 if _are_named() else 1 + int(seconds / _POLL_S)


@cache
def _are_named() -> bool:
    """Whether torch names gloo's threads, which it did not before 2.11."""
    return is_torch_version(">=", "2.11")


def _threads_of_gloo() -> dict[str, _Thread]:
    """The threads that may be gloo's, by their number.

    Where torch gives them no name: all those that have the process's own name, as a thread has that of the
    one that made it, and were not started by Python; none where there is no group any more.
    """
    threads = {task.name: thread for task in _TASKS.glob("*") if (thread := _read(task))}
    if _are_named() or not threads or not (dist.is_available() and dist.is_initialized()):
        return {task: thread for task, thread in threads.items() if thread.name == _THREAD}
    name = (_TASKS.parent / "comm").read_text(errors="replace").strip()
    # The calling one by itself: Python has an old number for it in a process that was forked. A dummy stands
    # for a thread that Python did not start, and that has called a function of Python.
    ours = {threading.get_native_id()} | {
        thread.native_id for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)
    }
    return {task: thread for task, thread in threads.items() if thread.name == name and int(task) not in ours}


def _read(task: Path) -> _Thread | None:
    try:
        lines = (task / "status").read_text(errors="replace").splitlines()
    except OSError:  # the thread has ended
        return None
    status = dict(line.split(":", 1) for line in lines)
    # Not every system counts them; the state alone says less.
    wakings = sum(int(status.get(name, 0)) for name in _SWITCHES)
    return _Thread(status["Name"].strip(), status["State"].split()[0], wakings, time.monotonic())
