"""Where workers' output goes: straight through, with the rank before each line, and into log files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from accel_launch.local.output.console import Console
from accel_launch.local.output.log_file import Log
from accel_launch.local.output.streams import Stream, copy_window_size, open_capture
from accel_launch.plan.plan import LaunchPlan


@dataclass(frozen=True)
class Channel:
    """One worker's streams.

    Args:
        streams: The reading ends; stderr first.
        stdout: The worker's stdout; None to inherit.
        stderr: The worker's stderr.
    """

    streams: list[Stream]
    stdout: int | None
    stderr: int

    def close_writing(self) -> None:
        """Close the worker's ends in this process, so that the reading ends see the worker's end."""
        os.close(self.stderr)
        if self.stdout is not None:
            os.close(self.stdout)


@dataclass(frozen=True)
class Output:
    """How the output of a run is shown and kept.

    stderr always passes through the launcher, which needs its end for the summary. stdout does so only for a
    prefix, a log file, or a worker on another machine.

    Args:
        stdout: The launcher's stdout.
        stderr: The launcher's stderr.
        prefixed: Streams that get the rank before every line: 1, 2.
        role: The text before the rank in the prefix.
        folder: The log files' folder, new for each run; None for no log files.
        logged: Streams that are copied to log files: 1, 2.
        captured: Whether stdout passes through the launcher.
        log_errors: Why log files are incomplete; the first one is shown at once.
    """

    stdout: Console
    stderr: Console
    prefixed: frozenset[int]
    role: str
    folder: Path | None
    logged: frozenset[int]
    captured: bool
    log_errors: list[OSError] = field(default_factory=list)

    @classmethod
    def of(cls, plan: LaunchPlan, *, captured: bool = False) -> Output:
        """Make the output that a plan's settings request, and its folder.

        Args:
            plan: The plan.
            captured: Let stdout pass through the launcher in any case, for workers that cannot inherit it.
        """
        tee, log_dir, role = (plan.settings.value(name) for name in ("tee", "log_dir", "role"))
        # torchrun's numbers: 1 is stdout, 2 is stderr, and 3 both.
        prefixed = frozenset({"0": (), "1": (1,), "2": (2,), "3": (1, 2)}[tee])
        folder = None
        if log_dir is not None:
            # The process id, as two launchers may start within a second.
            folder = Path(log_dir) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            folder.mkdir(parents=True)
        # Like torchrun: with --tee only the streams named there are copied, without it both.
        logged = (prefixed or frozenset((1, 2))) if folder else frozenset()
        return cls(
            stdout=Console(1),
            stderr=Console(2),
            prefixed=prefixed,
            role="rank" if role == "default" else role,
            folder=folder,
            logged=logged,
            # Otherwise workers write to the launcher's own stdout.
            captured=captured or 1 in prefixed | logged,
        )

    @property
    def consoles(self) -> tuple[Console, Console]:
        """The launcher's streams."""
        return self.stdout, self.stderr

    def open(self, rank: int, record: Path | None = None) -> Channel:
        """Open the streams of a worker.

        Args:
            rank: The worker's rank.
            record: The file in which it records the exception that ends it, if it is on this machine.
        """
        error, stderr = self._stream(rank, 2, self.stderr, record)
        if not self.captured:
            return Channel([error], None, stderr)
        out, stdout = self._stream(rank, 1, self.stdout)
        return Channel([error, out], stdout, stderr)

    def _stream(
        self, rank: int, number: int, console: Console, record: Path | None = None
    ) -> tuple[Stream, int]:
        log = None
        if self.folder is not None and number in self.logged:
            (self.folder / str(rank)).mkdir(exist_ok=True)
            name = "stdout.log" if number == 1 else "stderr.log"
            log = Log(self.folder / str(rank) / name, self._on_log_error)
        reading, writing = open_capture(console.descriptor)
        prefix = f"[{self.role}{rank}]: ".encode() if number in self.prefixed else b""
        stream = Stream(reading, console, log=log, prefix=prefix, delay_tracebacks=number == 2, record=record)
        return stream, writing

    def _on_log_error(self, error: OSError) -> None:
        # Once: a full disk would repeat it with every line.
        if not self.log_errors:
            self.say(
                f"accel launch: warning: the log files in {self.folder} are incomplete from here on: "
                f"{error.strerror or error}. The run continues.\n"
            )
        self.log_errors.append(error)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return a worker's environment: a captured stdout must not wait in the worker's buffer.

        Args:
            environ: The worker's environment so far.
        """
        # Before the worker's own variables, so that a user's PYTHONUNBUFFERED wins.
        captured = {"PYTHONUNBUFFERED": "1"} if self.captured else {}
        return {**captured, **environ}

    def resize(self, streams: Iterable[Stream]) -> None:
        """Set the size of the workers' terminals to that of the launcher's.

        Args:
            streams: The workers' streams.
        """
        for stream in streams:
            if stream.console is not None and not stream.closed:
                copy_window_size(stream.console.descriptor, stream.descriptor)

    def say(self, text: str) -> None:
        """Show a message of the launcher itself on stderr.

        Args:
            text: The message with its line end.
        """
        self.stderr.write(text.encode())

    def finish(self) -> None:
        """Wait until everything is written."""
        for console in self.consoles:
            console.flush(block=True)
