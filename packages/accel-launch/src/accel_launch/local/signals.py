"""Signals as readable events, so that one wait covers signals, workers' ends and their output."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

from accel_launch.errors import LaunchError


def known_signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return those of the signals that this system has: Windows lacks most of them.

    Args:
        *names: Their names, e.g. SIGHUP.
    """
    return tuple(signal.Signals[name] for name in names if name in signal.Signals.__members__)


ENDING = known_signals("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that request the launcher, and so the workers, to end."""

_OTHERS = known_signals("SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGWINCH")


def signal_name(number: int) -> str:
    """Return a signal's name, e.g. SIGKILL.

    Args:
        number: The signal.
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing; the interpreter writes the number to the wake-up pipe."""


def _require_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("Several workers can be started only from the main thread, which gets the signals.")


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit(143), after a line on stderr, inside a `with` block.

    Raises:
        LaunchError: In another thread than the main one.
    """
    _require_main_thread()
    requested: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        requested.append(number)
        # os.write: print is not safe in a handler that may have interrupted another print.
        os.write(2, b"accel launch: SIGTERM: ended, as no worker runs.\n")
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except BaseException:
        if requested:  # Ray converts it to another exception
            raise SystemExit(128 + requested[0]) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


class SignalPipe:
    """Catches signals inside a `with` block; `read` returns those that arrived.

    A signal that was ignored when the launcher started (nohup) stays ignored.
    """

    def __enter__(self) -> SignalPipe:
        _require_main_thread()
        self.descriptor, self._writing = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writing, False)
        # Handlers run between bytecodes, and not while poll() waits; the byte written here wakes it. Before
        # the handlers: a signal between would be lost.
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._before = {
            # A handler that does nothing: with the default one the signal would end this process.
            number: signal.signal(number, _note)
            for number in (signal.SIGCHLD, *ENDING, *_OTHERS)
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Before the pipe is closed: a signal between would be written into another file.
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.descriptor)
        os.close(self._writing)
        self._writing = -1  # for a thread that wakes late: the descriptor may be reused

    def wake(self) -> None:
        """Make `read` return a SIGCHLD, for threads that notice a worker's end in another way."""
        with contextlib.suppress(OSError):  # full, so it is read soon; or closed
            os.write(self._writing, bytes([signal.SIGCHLD]))

    def read(self) -> list[int]:
        """Return the numbers of the signals that arrived since the last call."""
        try:
            return list(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return []
