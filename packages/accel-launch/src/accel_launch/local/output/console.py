"""Write workers' output to the launcher's own stdout or stderr without ever being stuck there."""

from __future__ import annotations

import os
import select

from accel_state import env

_ATOMIC = 4096  # what a pipe or terminal takes without blocking once poll calls it writable
# 1 MiB: more than any burst of tracebacks, and little memory.
_FULL = 1 << 20


def has_colour(descriptor: int) -> bool:
    """Return whether to write in colour: to a terminal, unless NO_COLOR is set.

    Args:
        descriptor: What is written to.
    """
    return os.isatty(descriptor) and not env.is_set("NO_COLOR") and env.raw("TERM") != "dumb"


class Console:
    """One of the launcher's own streams, with a buffer for what it does not take at once.

    Args:
        descriptor: The stream's file descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._pending = bytearray()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    @property
    def pending(self) -> bool:
        """Whether something waits for the stream to take it."""
        return bool(self._pending)

    @property
    def full(self) -> bool:
        """Whether so much waits that workers should be made to wait too."""
        return len(self._pending) >= _FULL

    def write(self, data: bytes) -> None:
        """Write what the stream takes now and keep the rest for `flush`.

        Args:
            data: Whole lines, where there is a choice.
        """
        self._pending += data
        self.flush()

    def flush(self, *, block: bool = False) -> None:
        """Write what was kept.

        Args:
            block: Wait until everything is written.
        """
        written = 0
        try:
            # One small piece after each poll: a write of more than the stream has room for would block.
            while written < len(self._pending) and self._poll.poll(None if block else 0):
                written += os.write(self.descriptor, self._pending[written : written + _ATOMIC])
        except OSError:  # the reader is gone; the workers continue, as with any closed terminal
            written = len(self._pending)
        del self._pending[:written]
