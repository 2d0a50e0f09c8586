"""One worker process with everything it starts: its own session and process group."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence

__all__ = ["Worker", "adopt_orphans"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans(adopt: bool) -> None:
    """Become the parent of descendants whose own parent dies, so that their end can be waited for (Linux).

    Args:
        adopt: True to begin, False to end it.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _die_with_parent() -> Callable[[], None] | None:
    """Return what a child runs before its program, to be killed by the kernel when this process dies."""
    if sys.platform != "linux":
        return None  # the guard process does it alone there
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before the request was made
            os._exit(1)

    return prepare


class Worker:
    """One worker and its process group.

    The group outlives the worker while something that the worker started is still running in it.

    Args:
        rank: The worker's rank.
        command: The program and its arguments.
        environ: Its environment.
        stdin: As for subprocess.Popen; None inherits.
        stdout: The same.
        stderr: The same.
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
    ) -> None:
        self.rank = rank
        self.returncode: int | None = None
        self.gone = False
        self.term_at: float | None = None
        self.kill_at: float | None = None
        self.killed = False
        with warnings.catch_warnings():
            # Python 3.12 warns when a program with threads forks; the child makes two system calls and execs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        """Whether the worker itself has not ended."""
        return self.returncode is None

    def signal(self, number: int) -> None:
        """Send a signal to the worker alone.

        Args:
            number: The signal.
        """
        if self.running:
            os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker and everything in its group.

        Args:
            number: The signal.
        """
        if not self.gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def kill_by(self, at: float) -> None:
        """Set the time, from time.monotonic(), at which the group is killed, unless an earlier one is set.

        Args:
            at: The time.
        """
        if not self.killed:
            self.kill_at = at if self.kill_at is None else min(self.kill_at, at)

    def kill(self, abandon_at: float) -> None:
        """Kill the group.

        Args:
            abandon_at: When to stop waiting for its end.
        """
        self.signal_group(signal.SIGKILL)
        self.killed = True
        self.kill_at = abandon_at

    def reap(self) -> bool:
        """Collect what has ended in the group.

        Returns:
            True if the worker itself ended since the last call. `gone` tells whether anything is left.
        """
        ended = False
        while not self.gone:
            try:
                pid, status = os.waitpid(-self.pid, os.WNOHANG)
            except ChildProcessError:
                self.gone = True
                break
            if pid == 0:
                break
            if pid == self.pid:
                self.returncode = self._process.returncode = os.waitstatus_to_exitcode(status)
                ended = True
        return ended

    def end(self) -> None:
        """Kill the group at once and wait for the worker, if anything of them is left."""
        self.signal_group(signal.SIGKILL)
        if self.running:
            self.returncode = self._process.wait()

    def abandon(self) -> None:
        """Stop waiting for a group that even SIGKILL does not end (a process stuck in the kernel)."""
        self.gone = True
        if self.returncode is None:
            self.returncode = self._process.returncode = -int(signal.SIGKILL)
