"""What the test process and a worker send each other, each message one pickle on a socket pair."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accel_world.functions import FunctionName

__all__ = ["Call", "Leave", "Reply", "Setup"]


@dataclass(frozen=True)
class Setup:
    """What a new worker starts with."""

    sys_path: list[str]
    stack_file: str  # where the worker writes its stacks on request (SIGUSR1)


@dataclass(frozen=True)
class Call:
    """One function to run as one rank of a world."""

    function: FunctionName
    arguments: bytes  # pickled (args, kwargs); read after the test file is imported
    rank: int
    size: int
    environment: dict[str, str | None]  # None removes the variable
    store_file: str
    timeout_s: float
    init: bool
    warning_filters: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class Leave:
    """Leave the process group: sent when every rank has returned, or immediately to a rank that raised.

    A rank that left earlier would break the ones that are still connecting or in their last collective.
    """


@dataclass(frozen=True)
class Reply:
    """What came of a call (a pickled result, or the text of the failure), and then of leaving."""

    result: bytes = b""
    failure: str = ""
    left: bool = False  # whether this is the answer to Leave
    worn: bool = False  # whether the process keeps so much of former calls that a new one is better
