"""A worker's stdout or stderr on its way to the console and to a log file.

Complete lines are passed on at once. A line without its end is passed on after a moment, so that prompts and
progress bars show. A traceback is delayed for a moment, as long as nothing follows it: if it ends the
worker, the summary shows it once and in one piece, else it is shown as one block.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from accel_launch.local.output.console import Console
from accel_launch.local.output.log_file import Log

TRACEBACK = b"Traceback (most recent call last):"
"""The first line of a traceback."""

# Longer than a line takes to be written in two pieces, shorter than a reader notices.
_PARTIAL_S = 0.05
_DELAY_S = 3.0  # a failed worker may need a while to end: it closes files, loaders, process groups
_DELAY_LAST_S = 20.0  # the same, if the worker has recorded its failure
_CONTINUES_S = 0.5  # output this long after the traceback means that the worker continues
# What accel_ops.debug.watchdog writes, in one piece.
_REPORT = re.compile(rb"^Watchdog, process .*\n(?:  .*\n)*", re.MULTILINE)
# A deep traceback has some kilobytes.
_TAIL_BYTES = 32768
_DRAIN_READS = 64  # more than a pipe holds; a child of the worker may still be writing to it


def open_capture(like: int) -> tuple[int, int]:
    """Open a channel for a worker's output: a terminal if the launcher has one, or a pipe.

    Args:
        like: The launcher's own file descriptor.

    Returns:
        The reading end, non-blocking, and the end for the worker.
    """
    if os.isatty(like):
        import tty  # Windows does not have it

        reading, writing = os.openpty()
        # The real terminal translates line ends; doing it twice would garble them.
        tty.setraw(writing)
        copy_window_size(like, reading)
    else:
        reading, writing = os.pipe()
    os.set_blocking(reading, False)
    return reading, writing


def copy_window_size(source: int, target: int) -> None:
    """Give one terminal the size of another.

    Args:
        source: File descriptor of the terminal to copy from.
        target: File descriptor of the terminal to change; anything else is left unchanged.
    """
    # Windows does not have them.
    import fcntl
    import termios

    with contextlib.suppress(OSError):
        # 8 bytes: struct winsize has four unsigned shorts.
        fcntl.ioctl(target, termios.TIOCSWINSZ, fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8)))


class Stream:
    """One stream of one worker.

    Args:
        descriptor: The reading end, non-blocking; the stream closes it.
        console: Where it is shown; None for nowhere.
        log: What gets a copy; None for none.
        prefix: Shown before every line.
        delay_tracebacks: Delay tracebacks, which may belong in the summary.
        record: The file in which the worker records the exception that ends it; if it has, the
            traceback is its last and is delayed longer.
    """

    def __init__(
        self,
        descriptor: int,
        console: Console | None,
        *,
        log: Log | None = None,
        prefix: bytes = b"",
        delay_tracebacks: bool = False,
        record: Path | None = None,
    ) -> None:
        self.descriptor = descriptor
        self.console = console
        self.delayed_since: float | None = None
        self.closed = False
        self._log = log
        self._prefix = prefix
        self._delay_tracebacks = delay_tracebacks
        self._record = record
        self._delayed = bytearray()
        self._partial = bytearray()
        self._partial_since = 0.0
        self._at_line_start = True
        self._tail = bytearray()

    def read(self, now: float) -> bool:
        """Pass on what the worker wrote.

        Args:
            now: The time, from time.monotonic().

        Returns:
            True if there may be more to read at once.
        """
        try:
            data = os.read(self.descriptor, 65536)
        except BlockingIOError:
            return False
        except OSError:  # a terminal reports its end as an error
            data = b""
        if not data:
            self.close()
            return False
        self._feed(data, now)
        return True

    def drain(self, now: float) -> None:
        """Read the available output, and show a line even if it is incomplete.

        Args:
            now: The time, from time.monotonic().
        """
        for _ in range(_DRAIN_READS):
            if self.closed or not self.read(now):
                break
        self._flush_partial(now)

    def deadline(self) -> float | None:
        """Return when `tick` has something to do."""
        times = [self._partial_since + _PARTIAL_S] if self._partial else []
        if self.delayed_since is not None:
            times.append(self._delayed_until(self.delayed_since))
        return min(times, default=None)

    def _delayed_until(self, since: float) -> float:
        return since + (_DELAY_LAST_S if self._has_recorded_failure() else _DELAY_S)

    @property
    def is_failing(self) -> bool:
        """Whether the worker has just shown a traceback, or is ending by an exception."""
        return self.delayed_since is not None or self._has_recorded_failure()

    def _has_recorded_failure(self) -> bool:
        return self._record is not None and self._record.exists()

    def tick(self, now: float) -> None:
        """Show output whose delay is over.

        Args:
            now: The time, from time.monotonic().
        """
        if self._partial and now >= self._partial_since + _PARTIAL_S:
            self._flush_partial(now)
        if self.delayed_since is not None and now >= self._delayed_until(self.delayed_since):
            self._show(self.take_delayed())

    def take_delayed(self) -> bytes:
        """Return the delayed traceback, which this stream will then not show."""
        delayed = bytes(self._delayed)
        self._delayed.clear()
        self.delayed_since = None
        return delayed

    def tail(self) -> bytes:
        """Return the end of the output: its last traceback, else its last lines."""
        start = self._tail.rfind(TRACEBACK)
        if start >= 0:
            return bytes(self._tail[self._tail.rfind(b"\n", 0, start) + 1 :])
        return b"".join(bytes(self._tail).splitlines(keepends=True)[-20:])

    def show(self, data: bytes) -> None:
        """Show text of this worker on its console.

        Args:
            data: Text taken from `take_delayed`.
        """
        self._show(data)

    def close(self) -> None:
        """Close the reading end and the log file; a delayed traceback or half a line can still be taken."""
        if not self.closed:
            self.closed = True
            os.close(self.descriptor)
            if self._log is not None:
                self._log.close()

    def _feed(self, data: bytes, now: float) -> None:
        if self._log is not None:
            self._log.write(data)
        self._tail += data
        # Cut at twice the size, not at every read, to move bytes rarely.
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
        # Progress bars end their lines by a carriage return.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            self._pass_on(bytes(self._partial) + data[:end], now)
            self._partial.clear()
        if data[end:]:
            if not self._partial:
                self._partial_since = now
            self._partial += data[end:]
            if len(self._partial) > _TAIL_BYTES:
                self._flush_partial(now)

    def _flush_partial(self, now: float) -> None:
        partial = bytes(self._partial)
        self._partial.clear()
        if partial:
            self._pass_on(partial, now)

    def _pass_on(self, text: bytes, now: float) -> None:
        continues = self.delayed_since is not None and now >= self.delayed_since + _CONTINUES_S
        if continues and not self._has_recorded_failure():
            self._show(self.take_delayed())
        if self._delay_tracebacks and self.delayed_since is None and (start := text.find(TRACEBACK)) >= 0:
            # From the beginning of that line: torch may have put the rank before it.
            start = text.rfind(b"\n", 0, start) + 1
            self._show(text[:start])
            self.delayed_since, text = now, text[start:]
        if self.delayed_since is None:
            self._show(text)
            return
        # It describes all processes, unlike a summary.
        self._show(b"".join(_REPORT.findall(text)))
        self._delayed += _REPORT.sub(b"", text)
        # More than a traceback has: the worker continues to write, so there is no reason for a delay.
        if len(self._delayed) > _TAIL_BYTES:
            self._show(self.take_delayed())

    def _show(self, text: bytes) -> None:
        if self.console is None or not text:
            return
        if self._prefix:
            lines = text.splitlines(keepends=True)
            first = self._prefix if self._at_line_start else b""
            self._at_line_start = text.endswith((b"\n", b"\r"))
            text = first + self._prefix.join(lines)
        self.console.write(text)
