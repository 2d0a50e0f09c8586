"""Waiting, before a process group or the interpreter ends, until gloo's threads have released their tensors.

A gloo thread that finishes a collective drops its tensors after it has woken the waiting thread, and needs
the GIL for that. Two things go wrong when it has not had the GIL yet, in plain torch 2.13 scripts too:

- The last reference to the group is dropped: its destructor waits for the thread while it holds the GIL, and
  the process deadlocks.
- The interpreter is shutting down: the GIL is no longer released, the thread is unwound in the middle of a
  destructor, and the process aborts ("terminate called without an active exception") although the script
  succeeded.
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
_TASKS = Path("/proc/self/task")  # Linux; elsewhere only the first short wait happens
_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
_PAUSE_S = _INTERVAL_S = 0.001
_POLL_S = 0.01  # how often a thread of gloo polls the network


class _Thread(NamedTuple):
    """The system's status of a thread: name, state letter, number of context switches, time of reading."""

    name: str
    state: str
    switches: int
    read_at: float


def wait_for_gloo_threads(limit_s: float = 5.0) -> None:
    """Wait until no gloo thread is working, or waiting for the GIL.

    A thread that waits for the GIL sleeps like an idle one, but wakes once per switch interval (shortened
    meanwhile) to request it. So the threads are idle if none has woken while this one kept the GIL for
    several intervals: also on a machine so busy that a thread which gets the GIL does not run at once.

    Args:
        limit_s: How long to wait at most, in seconds.
    """
    until = time.monotonic() + limit_s
    # Unnamed threads may poll, so it takes several wake-ups to recognise one that waits.
    intervals = 4 if _are_named() else 8
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_INTERVAL_S)
    try:
        time.sleep(_PAUSE_S)  # releases the GIL to a waiting thread, which requests it again from now on
        before = _gloo_threads()
        while before and time.monotonic() < until:
            _keep_gil(intervals * _INTERVAL_S)
            now = _gloo_threads()
            if not _is_working(before, now):
                return
            time.sleep(_PAUSE_S)
            before = _gloo_threads()
    finally:
        sys.setswitchinterval(interval)


def wait_for_gloo_threads_at_exit() -> None:
    """Register `wait_for_gloo_threads` to run at exit; calling this twice is a no-op."""
    atexit.unregister(wait_for_gloo_threads)
    atexit.register(wait_for_gloo_threads)


def _keep_gil(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _is_working(before: dict[str, _Thread], now: dict[str, _Thread]) -> bool:
    """Whether a thread runs, waits for a CPU or the disk, or has woken more often than an idle one."""
    if before.keys() != now.keys() or any(thread.state in "RD" for thread in now.values()):
        return True
    return any(
        thread.switches - before[task].switches > _max_idle_switches(thread.read_at - before[task].read_at)
        for task, thread in now.items()
    )


def _max_idle_switches(seconds: float) -> int:
    """How often an idle thread may wake: named threads do not poll."""
    return 0 if _are_named() else 1 + int(seconds / _POLL_S)


@cache
def _are_named() -> bool:
    """Whether torch names gloo's threads, as it does from 2.11 on."""
    return is_torch_version(">=", "2.11")


def _gloo_threads() -> dict[str, _Thread]:
    """The threads that may be gloo's, by thread id.

    Where torch does not name them: all threads with the name of the process, which threads inherit, that
    Python did not start; none once there is no process group.
    """
    threads = {task.name: thread for task in _TASKS.glob("*") if (thread := _read(task))}
    if _are_named() or not threads or not (dist.is_available() and dist.is_initialized()):
        return {task: thread for task, thread in threads.items() if thread.name == _THREAD}
    name = (_TASKS.parent / "comm").read_text(errors="replace").strip()
    # The calling thread separately: in a forked process Python has an old id for it. A dummy thread is one
    # that Python did not start, and that has called a Python function.
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
    # Not every system counts them.
    switches = sum(int(status.get(name, 0)) for name in _SWITCHES)
    return _Thread(status["Name"].strip(), status["State"].split()[0], switches, time.monotonic())
