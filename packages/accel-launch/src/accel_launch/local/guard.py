"""A small process that ends the workers if the launcher is killed.

A launcher that gets SIGKILL cannot clean up. The guard has the reading end of a pipe whose only writing end
is the launcher's; when the launcher ends for any reason, the pipe closes and the guard kills the process
groups that were added to it. On Linux each worker also asks the kernel to be killed with its parent (see
`accel_launch.local.worker`); the guard adds the workers' own children, which that request does not cover.
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings


class Guard:
    """The launcher's handle on its guard process.

    Args:
        detached: Detach the guard from this process, for a process that is killed together with its children.
    """

    def __init__(self, *, detached: bool = False) -> None:
        reading, self._writing = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns when a program with threads forks; the child only reads a pipe and kills.
            warnings.simplefilter("ignore", DeprecationWarning)
            # fork without exec: starting Python again takes longer than all the work of the child.
            self._pid = os.fork()
        if self._pid == 0:
            if detached and os.fork():
                os._exit(0)
            os.close(self._writing)
            _watch(reading)
        # The first child ends at once, and the second is adopted by init.
        if detached:
            os.waitpid(self._pid, 0)
        os.close(reading)

    def add(self, group: int) -> None:
        """Kill a process group if this process dies.

        Args:
            group: The group's id.
        """
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Stop watching a process group that has ended.

        Args:
            group: The group's id.
        """
        self._write(f"-{group}\n")

    def close(self) -> None:
        """End the guard; groups that were added and not removed are killed."""
        os.close(self._writing)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _write(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the guard was killed; the run continues without it
            # Shorter than PIPE_BUF, so written atomically.
            os.write(self._writing, line.encode())


def _watch(pipe: int) -> None:
    """Read the groups until the pipe ends, kill those that are left, and exit; never returns."""
    try:
        # Not in the terminal's group, which gets Ctrl-C, nor in the launcher's, which may be killed.
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # it works without
            _close_inherited(pipe)
        groups: set[int] = set()
        # Ends when the last writing end is closed, as the kernel does for a killed launcher.
        with open(pipe, encoding="ascii") as lines:
            for line in lines:
                change = groups.add if line[0] == "+" else groups.discard
                change(int(line[1:]))
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)


def _close_inherited(pipe: int) -> None:
    """Close the launcher's descriptors except for the pipe: readers of its output must see it end."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    # Not every number up to the limit, which takes minutes if it is huge and the kernel old.
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2 and descriptor != pipe:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(descriptor)
