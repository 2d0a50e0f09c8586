"""A worker on any machine, for its supervisor: how it ended, and when it must be stopped."""

from __future__ import annotations

import signal
import socket
from abc import ABC, abstractmethod

from accel_launch.local.failures.record import Raised


class SupervisedWorker(ABC):
    """A worker and its process group.

    The group outlives the worker while processes that it started are running.

    Args:
        rank: The worker's rank.
        host: The name of its machine; this one's by default.

    Attributes:
        returncode: Its exit code, or minus the signal that ended it; None while it runs.
        raised: The exception that ended it, if it was recorded.
    """

    pid: int

    def __init__(self, rank: int, host: str | None = None) -> None:
        self.rank = rank
        self.host = socket.gethostname() if host is None else host
        self.returncode: int | None = None
        self.raised: Raised | None = None
        self.gone = False
        self.term_at: float | None = None
        self.kill_at: float | None = None
        self.killed = False

    @property
    def running(self) -> bool:
        """Whether the worker itself has not ended."""
        return self.returncode is None

    def signal(self, number: int) -> None:
        """Send a signal only to the worker.

        Args:
            number: The signal.
        """
        if self.running:
            self._send(number, group=False)

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker and everything in its group.

        Args:
            number: The signal.
        """
        if not self.gone:
            self._send(number, group=True)

    def kill_by(self, at: float) -> None:
        """Set the time, from time.monotonic(), at which the group is killed, unless an earlier one is set.

        Args:
            at: The time.
        """
        if not self.killed:
            # The earliest applies: a second Ctrl-C can only shorten the time.
            self.kill_at = at if self.kill_at is None else min(self.kill_at, at)

    def kill(self, abandon_at: float) -> None:
        """Kill the group.

        Args:
            abandon_at: When to stop waiting for its end.
        """
        self.signal_group(signal.SIGKILL)
        self.killed = True
        # The same deadline is then the time to give up, as a second SIGKILL has no effect.
        self.kill_at = abandon_at

    def abandon(self) -> None:
        """Stop waiting for a group that even SIGKILL does not end."""
        self.gone = True
        if self.returncode is None:
            # As in Popen for a process that a signal ended.
            self.returncode = -int(signal.SIGKILL)

    @abstractmethod
    def _send(self, number: int, *, group: bool) -> None:
        """Send a signal to the worker, or to its group."""

    @abstractmethod
    def reap(self) -> bool:
        """Reap the ended processes of the group.

        Returns:
            True if the worker itself ended since the last call. `gone` is True when none is left.
        """

    @abstractmethod
    def end(self) -> None:
        """Kill the group immediately, if any of it is left."""
