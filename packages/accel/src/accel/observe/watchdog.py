"""The watchdog of a run: settings, and one thread for all Accelerators of a process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.observe.base import ObserverKwargs
from accel_ops.debug.watchdog import Watchdog
from accel_state.env.fields import from_env, read_environment
from accel_state.logging.warning import warn
from accel_state.step_events import Observer

if TYPE_CHECKING:
    from accel.training.run import Run

DEFAULT_TIMEOUT_S = 120.0
"""Longer than a checkpoint or an evaluation on the main process usually keeps the other ranks waiting."""


@dataclass
class WatchdogKwargs(ObserverKwargs):
    """Settings of the watchdog, which reports a collective that waits too long.

    One process per machine prints which processes have arrived, which have not, and where each is. With one
    process it does nothing.

    Args:
        timeout: The limit, in seconds; default: ACCELERATE_WATCHDOG, then 120.
        abort: End every process after the report, with exit code 1; default: ACCELERATE_WATCHDOG_ABORT, then
            False.

    Raises:
        ValueError: If the timeout is not a number of seconds above 0, or `abort` not a truth value.
    """

    timeout: float | None = from_env("ACCELERATE_WATCHDOG")
    abort: bool | None = from_env("ACCELERATE_WATCHDOG_ABORT")

    def __post_init__(self) -> None:
        user_set = read_environment(self)
        if self.timeout is None:
            self.timeout = DEFAULT_TIMEOUT_S
        # bool is an int to isinstance, and True would pass for a second.
        is_number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
        if not is_number or not 0 < self.timeout < math.inf:
            name = "WatchdogKwargs(timeout=...)" if "timeout" in user_set else "ACCELERATE_WATCHDOG"
            raise ValueError(
                f"{name} is {self.timeout!r}; it takes a number of seconds above 0. Leave it out to run "
                "without a watchdog."
            )
        if not isinstance(self.abort, bool):
            raise ValueError(f"WatchdogKwargs(abort=...) is {self.abort!r}; it takes True or False.")

    def start(self, run: Run) -> Observer:
        """Start the watchdog of this process, unless another Accelerator has."""
        global _running
        assert self.timeout is not None
        if _running is None or not _running.dog.is_running:
            _running = _Shared(Watchdog(run.process, float(self.timeout), bool(self.abort)))
        elif (_running.dog.timeout_s, _running.dog.abort) != (self.timeout, self.abort):
            warn(
                f"WatchdogKwargs(timeout={self.timeout!r}, abort={self.abort!r}) is ignored: the watchdog "
                f"of an earlier Accelerator runs with timeout={_running.dog.timeout_s!r} and "
                f"abort={_running.dog.abort!r}. Pass the same, or end that one's training first."
            )
        _running.users += 1
        return WatchdogUser(_running)


@dataclass(eq=False)
class _Shared:
    dog: Watchdog
    users: int = 0


# Two Accelerators of one process wait in one thread: a second watchdog would report the same again.
_running: _Shared | None = None


class WatchdogUser(Observer):
    """One Accelerator that uses the watchdog of the process, which ends with the last of them."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared

    def stop(self) -> None:
        """End the watchdog, if no other Accelerator uses it."""
        self._shared.users -= 1
        if self._shared.users == 0:
            self._shared.dog.stop("end_training was called")
