"""Where debug mode takes hold: what is called when a process joins a run, waits, and leaves.

The comparison itself stands in a package above this one, which says here what to call. Without debug mode
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
    """Say what is called in debug mode, in a run of several processes.

    Args:
        joined: Called when this process has joined the process group.
        waits: Called before this process waits until every process has come; may raise.
        leaves: Called when the work of this process in the run is over, and the process itself may live on.
    """
    global _calls
    _calls = _Calls(joined, waits, leaves)


def joined(process: ProcessInfo) -> None:
    """Notify debug mode that this process has joined the process group.

    Args:
        process: The facts of this process.
    """
    if process.debug and process.world_size > 1 and _calls is not None:
        _calls.joined(process)


def waits(process: ProcessInfo) -> None:
    """Notify debug mode that this process is about to wait for the others.

    Args:
        process: The facts of this process.
    """
    if process.debug and process.world_size > 1 and _calls is not None:
        _calls.waits(process)


def leaves() -> None:
    """Notify debug mode that the work of this process in the run is over."""
    if _calls is not None:
        _calls.leaves()
