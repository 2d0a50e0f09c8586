"""What a failed run of a world looks like to a reader."""

from __future__ import annotations

import signal
from dataclasses import dataclass

__all__ = ["Outcome", "WorldFailure", "describe_exit", "describe_failure"]


class WorldFailure(AssertionError):
    """A rank failed, died or did not come back; the message has every rank's account."""


@dataclass(frozen=True)
class Outcome:
    """What came of one rank."""

    kind: str  # "returned", "raised", "died" or "stuck"
    account: str = ""  # traceback, exit code or stack
    result: bytes = b""
    output: str = ""  # stdout and stderr


def describe_exit(code: int | None) -> str:
    """Say how a process ended, from its return code."""
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}"


def describe_failure(title: str, outcomes: list[Outcome]) -> str:
    """Write every rank's account under a title that counts them."""
    counts = ", ".join(f"rank {rank} {outcome.kind}" for rank, outcome in enumerate(outcomes))
    parts = [f"{title}: {counts}"]
    for rank, outcome in enumerate(outcomes):
        parts.append(f"\n[rank {rank}] {outcome.kind}")
        if outcome.account:
            parts.append(outcome.account.rstrip())
    return "\n".join(parts)
