"""Write workers' output to the launcher's own stdout or stderr without blocking."""

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
        descriptor: The file descriptor.
    """
    return os.isatty(descriptor) and not env.is_set("NO_COLOR") and env.raw("TERM") != "dumb"


class Console:
    """One of the launcher's own streams, with a buffer for data that it does not accept immediately.

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
        """Whether data is buffered."""
        return bool(self._pending)

    @property
    def full(self) -> bool:
        """Whether so much data is buffered that workers should wait."""
        return len(self._pending) >= _FULL

    def write(self, data: bytes) -> None:
        """Write what the stream accepts now and buffer the rest for `flush`.

        Args:
            data: Complete lines, if possible.
        """
        self._pending += data
        self.flush()

    def flush(self, *, block: bool = False) -> None:
        """Write the buffered data.

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
