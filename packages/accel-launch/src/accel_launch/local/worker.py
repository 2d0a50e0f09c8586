"""One worker process and the processes it starts, in its own session and process group."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accel_launch.local.failures.record import read_record
from accel_launch.local.supervised_worker import SupervisedWorker

# Numbers of linux/prctl.h; Python has no names for them.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans(adopt: bool) -> None:
    """Become the parent of descendants whose parent dies, to wait for their end (Linux).

    Args:
        adopt: True to start, False to stop.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _die_with_parent(heed: Sequence[int]) -> Callable[[], None] | None:
    """Return a function that makes the kernel kill a child when this process dies; the child runs it."""
    if sys.platform != "linux":
        return None  # only the guard process does it there
    # Looked up here: between fork and exec nothing may be imported or take a lock.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        for number in heed:
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() != parent:  # it died before the request was made
            os._exit(1)

    return prepare


class Worker(SupervisedWorker):
    """One worker and its process group.

    The group outlives the worker while processes that it started are running.

    Args:
        rank: The worker's rank.
        command: The program and its arguments.
        environ: Its environment.
        stdin: As for subprocess.Popen; None inherits.
        stdout: The same.
        stderr: The same.
        folder: Its working directory; this process's by default.
        heed: Signals that it does not ignore even if this process does (Linux).
        record: The file in which it records the exception that ends it (`accel_state.process.failure`).
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        folder: str | None = None,
        heed: Sequence[int] = (),
        record: Path | None = None,
    ) -> None:
        super().__init__(rank)
        self._record = record
        if record is not None:
            environ = {**environ, "TORCHELASTIC_ERROR_FILE": str(record)}
        with warnings.catch_warnings():
            # Python 3.12 warns when a program with threads forks; the child makes two system calls and execs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                # A session, and so its own group: killpg reaches all that the worker
                # starts, and Ctrl-C only this process.
                start_new_session=True,
                preexec_fn=_die_with_parent(heed),
            )
        self.pid = self._process.pid

    def _send(self, number: int, *, group: bool) -> None:
        if group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)

    def reap(self) -> bool:
        """Reap the ended processes of the group; True if the worker itself ended."""
        ended = False
        while not self.gone:
            try:
                # By the group's id: orphans of the worker are children of this process (adopt_orphans).
                pid, status = os.waitpid(-self.pid, os.WNOHANG)
            except ChildProcessError:
                self.gone = True
                break
            # Children of the group are still running.
            if pid == 0:
                break
            if pid == self.pid:
                # Popen did not see the end itself, and would warn of a running child.
                self.returncode = self._process.returncode = os.waitstatus_to_exitcode(status)
                self.raised = None if self._record is None else read_record(self._record)
                ended = True
        return ended

    def end(self) -> None:
        """Kill the group immediately and wait for the worker, if any of them is left."""
        self.signal_group(signal.SIGKILL)
        if self.running:
            self.returncode = self._process.wait()

    def abandon(self) -> None:
        """Stop waiting for a group that even SIGKILL does not end (a process stuck in the kernel)."""
        super().abandon()
        self._process.returncode = self.returncode
