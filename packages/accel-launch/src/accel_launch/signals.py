"""Signals as readable events, so that one wait covers signals, workers' ends and their output."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType

from accel_launch.errors import LaunchError

__all__ = ["ENDING", "SignalPipe"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask the launcher, and so the workers, to end."""

_OTHERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGWINCH)


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing; the number is written to the wake-up pipe by the interpreter."""


class SignalPipe:
    """Catches signals for the length of a `with` block; `read` returns those that arrived.

    A signal that was ignored when the launcher started (nohup) stays ignored.
    """

    def __enter__(self) -> SignalPipe:
        if threading.current_thread() is not threading.main_thread():
            raise LaunchError(
                "Several workers can be started from the main thread alone: it gets the signals."
            )
        self.descriptor, self._writing = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writing, False)
        self._before = {
            number: signal.signal(number, _note)
            for number in (signal.SIGCHLD, *ENDING, *_OTHERS)
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN
        }
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.descriptor)
        os.close(self._writing)

    def wake(self) -> None:
        """Let `read` find a SIGCHLD; for threads that learn of a worker's end otherwise."""
        with contextlib.suppress(BlockingIOError):  # it is full, and so read soon
            os.write(self._writing, bytes([signal.SIGCHLD]))

    def read(self) -> list[int]:
        """Return the numbers of the signals that arrived since the last call."""
        try:
            return list(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return []
