"""What is said when a run fails: who failed first, how, and its last words."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

__all__ = ["describe_end", "failure_summary", "signal_name"]


def signal_name(number: int) -> str:
    """Return a signal's name, e.g. SIGKILL.

    Args:
        number: The signal.
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_end(returncode: int) -> str:
    """Say how a process ended.

    Args:
        returncode: Its exit code, or minus the signal that ended it.
    """
    if returncode >= 0:
        return f"exit code {returncode}"
    hint = "; often the machine ran out of memory" if returncode == -signal.SIGKILL else ""
    return f"killed by {signal_name(-returncode)}{hint}"


def failure_summary(
    rank: int,
    host: str,
    size: int,
    returncode: int,
    stopped: int,
    command: Sequence[str],
    words: bytes,
    logs: Path | None,
) -> str:
    """Return the summary of a failed run.

    Args:
        rank: The worker that failed first.
        host: The name of its machine.
        size: Number of workers.
        returncode: How it ended, as for `describe_end`.
        stopped: How many others were running and were stopped.
        command: What it ran.
        words: The end of its stderr.
        logs: The folder of the log files, if any.

    Returns:
        Lines for the launcher's stderr.
    """
    import shlex

    from accel_launch.masking import mask_command

    others = f"; {stopped} other{'s were' if stopped > 1 else ' was'} stopped" if stopped else ""
    lines = [
        f"accel launch: rank {rank} of {size} on {host} failed ({describe_end(returncode)}){others}.",
        f"  command: {shlex.join(mask_command(command))}",
    ]
    if logs is not None:
        lines.append(f"  logs: {logs}")
    text = words.decode(errors="replace").rstrip()
    lines.append(f"The end of its stderr:\n{text}" if text else "It wrote nothing to stderr.")
    return "\n".join(lines) + "\n"
