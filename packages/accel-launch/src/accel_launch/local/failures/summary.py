"""The summary of a failed run: the first failure with its traceback, and one line for each other."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_launch.local.failures.tracebacks import (
    FOLDED,
    HEADER,
    fold_frames,
    last_exception,
    library_folders,
)
from accel_launch.local.signals import known_signals, signal_name
from accel_launch.settings.redact import redact_command

_MAX_OTHERS = 8  # lines for workers that failed later
_CRASHES = tuple(-number for number in known_signals("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL"))
# Not SIGABRT: a worker that lost its peers may abort.

# Errors of a process that lost or misses a peer, as gloo, NCCL, the store and Python write them.
_LOST = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|ConnectionError|broken pipe|"
    r"socket (?:closed|timeout)|failed to recv|recvValue failed|ncclRemoteError|communicator was aborted|"
    r"timed out waiting|collective operation timeout|lost the store|not all others will come",
    re.IGNORECASE,
)
# gloo's check "op.preamble.length" fails if two processes exchange messages of different sizes.
_MISMATCH = re.compile(
    r"collective mismatch|op\.preamble\.length|timed out waiting|collective operation timeout", re.IGNORECASE
)
_HINT = (
    "Processes that call different operations, or pass different shapes, fail or wait like this: start the "
    "script with accel launch --debug to see what each of them calls, and where."
)


@dataclass(frozen=True)
class Failure:
    """How a worker failed.

    Args:
        rank: Its rank.
        host: The name of its machine.
        returncode: Its exit code, or minus the signal that ended it.
        at: When the failure began, from time.time().
        stderr_tail: The end of its stderr, as clean text.
        shown: Whether that text has been shown.
        stopped: Whether it was stopped because it did not end after its exception.
        terminated: Whether it was still running when another failed, and was sent SIGTERM.
    """

    rank: int
    host: str
    returncode: int
    at: float
    stderr_tail: str
    shown: bool = False
    stopped: bool = False
    terminated: bool = False

    @property
    def end(self) -> str:
        """How it ended, as text."""
        return "stopped after its exception" if self.stopped else describe_end(self.returncode)

    @property
    def exit_code(self) -> int:
        """The exit code of the run: 128 + n if signal n ended the worker, 1 after an exception."""
        if self.stopped:
            return 1
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def lost_peers(self) -> bool:
        """Whether it failed because it lost the connection to others, which therefore failed first."""
        return _LOST.search(last_exception(self.stderr_tail) or self.stderr_tail) is not None


def first_failure(failures: Collection[Failure]) -> Failure:
    """Return the failure that caused the others.

    Times alone are not enough: on a busy machine a worker's end can be seen before that of the lost peer.

    Args:
        failures: All failures, at least one.
    """

    def order(failure: Failure) -> tuple[int, float]:
        # Others can notice a crash before its end is seen, with errors that _LOST does not match.
        if failure.returncode in _CRASHES and not failure.stopped:
            return 0, failure.at
        # For example a worker that saves on SIGTERM and ends with 75, or is aborted by torch.
        if failure.terminated and not last_exception(failure.stderr_tail):
            return 3, failure.at
        return 2 if failure.lost_peers else 1, failure.at

    # Crashes first, then exceptions, then lost connections, then workers that were asked to end.
    return min(failures, key=order)


def describe_end(returncode: int) -> str:
    """Describe how a process ended.

    Args:
        returncode: Its exit code, or minus the signal that ended it.
    """
    if returncode >= 0:
        return f"exit code {returncode}"
    hint = ", which the system sends when memory runs out" if returncode == -signal.SIGKILL else ""
    return f"killed by {signal_name(-returncode)}{hint}"


@dataclass(frozen=True)
class Report:
    """The content of a summary in addition to the failures.

    Args:
        command_name: The command that prints it, e.g. `accel launch`.
        size: Number of workers.
        stopped: How many of them were stopped without having failed themselves.
        command: Their command; empty for a function.
        logs: The folder of the log files, if any.
        debug: Whether debug mode was on, in which no frame is left out.
        colour: Whether to write in colour.
    """

    command_name: str
    size: int
    stopped: int = 0
    command: Sequence[str] = ()
    logs: Path | None = None
    debug: bool = False
    colour: bool = False

    def paint(self, style: int, text: str) -> str:
        """Return text in a style of ANSI terminals, if there is colour.

        Args:
            style: 1 for bold, 2 for dim, 31 for red.
            text: The text, one line.
        """
        return f"\x1b[{style}m{text}\x1b[0m" if self.colour else text


def failure_summary(failures: Collection[Failure], report: Report) -> str:
    """Return the summary of a failed run: the first failure with its traceback, one line for each other.

    Args:
        failures: All failures, at least one.
        report: The rest of its content.

    Returns:
        Lines for the launcher's stderr.
    """
    first = first_failure(failures)
    stopped = report.stopped
    others = f"; {stopped} other{'s were' if stopped > 1 else ' was'} stopped" if stopped else ""
    failed = f"rank {first.rank} of {report.size} on {first.host} failed ({first.end})"
    title = f"{report.command_name}: {failed}{others}."
    lines = [report.paint(31, title)]
    if report.command:
        lines.append(f"  command: {shlex.join(redact_command(report.command))}")
    if report.logs is not None:
        lines.append(f"  logs: {report.logs}")
    lines += _stderr_lines(first, report)
    lines += _other_lines([failure for failure in failures if failure is not first])
    if not report.debug and _MISMATCH.search(first.stderr_tail):
        lines.append(_HINT)
    return "\n".join(lines) + "\n"


def _other_lines(others: list[Failure]) -> list[str]:
    others = sorted(others, key=lambda failure: failure.at)
    lines = []
    for failure in others[:_MAX_OTHERS]:
        tail = (last_exception(failure.stderr_tail) or failure.stderr_tail.rstrip()).splitlines()
        # An exception begins with its type; in other output the last line is most informative.
        text = tail[0 if HEADER in failure.stderr_tail else -1] if tail else "it wrote nothing to stderr"
        what = " lost its connection" if failure.lost_peers else ""
        lines.append(f"  then rank {failure.rank}{what} ({failure.end}): {text}")
    if len(others) > _MAX_OTHERS:
        lines.append(f"  then {len(others) - _MAX_OTHERS} more")
    return lines


def _stderr_lines(first: Failure, report: Report) -> list[str]:
    text = first.stderr_tail.rstrip()
    if not text:
        return ["It wrote nothing to stderr."]
    exception = last_exception(text)
    if exception and first.shown:
        return [f"Its traceback is shown above: {report.paint(1, exception)}"]
    if not report.debug:
        text = fold_frames(text, library_folders())
    bold = exception.partition("\n")[0] or None
    # Only lines that are shown in a style get escape codes: the others may be copied as they are.
    styles = [1 if line == bold else 2 if line.startswith(FOLDED) else 0 for line in text.splitlines()]
    lines = [
        report.paint(style, line) if style else line
        for style, line in zip(styles, text.splitlines(), strict=True)
    ]
    return ["The end of its stderr:", *lines]
