"""Hooks of debug mode: callbacks when a process joins a run, waits, and leaves.

The comparison itself is in a package above this one, which registers its callbacks here. Without debug mode
nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


@dataclass(frozen=True)
class _Calls:
    joined: Callable[[ProcessInfo], None]
    waits: Callable[[ProcessInfo], None]
    leaves: Callable[[], None]


# Set when accel_ops.debug is imported: this package must not import one above it.
_calls: _Calls | None = None


def register(
    joined: Callable[[ProcessInfo], None], waits: Callable[[ProcessInfo], None], leaves: Callable[[], None]
) -> None:
    """Register the callbacks of debug mode, for runs of several processes.

    Args:
        joined: Called when this process has joined the process group.
        waits: Called before this process waits for all others in a barrier; may raise.
        leaves: Called when this process has finished its work in the run; the process itself may live on.
    """
    global _calls
    _calls = _Calls(joined, waits, leaves)


def joined(process: ProcessInfo) -> None:
    """Notify debug mode that this process has joined the process group.

    Args:
        process: This process.
    """
    if process.debug and process.world_size > 1 and _calls is not None:
        _calls.joined(process)


def waits(process: ProcessInfo) -> None:
    """Notify debug mode that this process is about to wait for the others.

    Args:
        process: This process.
    """
    if process.debug and process.world_size > 1 and _calls is not None:
        _calls.waits(process)


def leaves() -> None:
    """Notify debug mode that this process has finished its work in the run."""
    if _calls is not None:
        _calls.leaves()
