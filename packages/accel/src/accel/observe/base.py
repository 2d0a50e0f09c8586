"""Which observers a run has, their settings, and the contexts in which a run is saved and loaded."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from accel.observe.replica_check import ReplicaCheck, steps_between_checks
from accel_state import env
from accel_state.handlers import KwargsHandler
from accel_state.logging.warning import warn
from accel_state.step_events import Observer, subscribe

if TYPE_CHECKING:
    from accel.training.run import Run

# The variable that turns an observer on, and its settings; imported when it is set.
_SETTINGS_OF_VARIABLE: dict[str, tuple[str, str]] = {
    "ACCELERATE_GUARD": ("accel.observe.guard.settings", "GuardKwargs"),
    "ACCELERATE_GUARD_BUNDLE": ("accel.observe.guard.settings", "GuardKwargs"),
    "ACCELERATE_REPLAY": ("accel.observe.guard.replay", "ReplayKwargs"),
    "ACCELERATE_STATISTICS": ("accel.observe.statistics", "StatisticsKwargs"),
    "ACCELERATE_VERIFY_FOLDER": ("accel.observe.verify.record", "RecordKwargs"),
    "ACCELERATE_WATCHDOG": ("accel.observe.watchdog", "WatchdogKwargs"),
}


class ObserverKwargs(KwargsHandler):
    """Base class of the settings of accel's observers; `kwargs_handlers` takes one of each kind."""

    def start(self, run: Run) -> Observer:
        """Make the observer of a run that has prepared nothing yet."""
        raise NotImplementedError


def start_observers(run: Run, handlers: Sequence[ObserverKwargs | Observer]) -> None:
    """Start the observers of a run.

    Args:
        run: The run, which gets them as `observers`; the events of its steps are published to them.
        handlers: Those of the Accelerator's handlers. An observer that a variable of the environment turns on
            is added with its defaults, unless its settings are among them.
    """
    requested = list(handlers)
    for variable, (module, name) in _SETTINGS_OF_VARIABLE.items():
        if env.is_set(variable):
            kind = getattr(importlib.import_module(module), name)
            if not any(isinstance(item, kind) for item in requested):
                requested.append(kind())
    if every := steps_between_checks(run.process):
        requested.append(ReplicaCheck(run, every))
    kinds = {kind.__name__ for item in requested for kind in type(item).__mro__}  # by name, to import none
    if env.get("ACCELERATE_WATCHDOG_ABORT") and "WatchdogKwargs" not in kinds:
        warn(
            "ACCELERATE_WATCHDOG_ABORT=true (accel launch --watch_abort) is ignored, as there is no "
            "watchdog: set ACCELERATE_WATCHDOG=120 too (--watch), or pass WatchdogKwargs() as a handler."
        )
    try:
        for item in requested:
            observer = item if isinstance(item, Observer) else item.start(run)
            run.observers.append(observer)
            subscribe(run.gradient_state, observer)
    except BaseException:
        # There will be no Accelerator whose end_training stops those that have started.
        while run.observers:
            run.observers.pop().stop()
        raise
    run.misuse.start(run)


@contextlib.contextmanager
def observed(run: Run, kind: str) -> Iterator[None]:
    """Enter a context of all observers of a run.

    Args:
        run: The run.
        kind: "saving" or "loading".
    """
    with contextlib.ExitStack() as contexts:
        for observer in run.observers:
            contexts.enter_context(getattr(observer, kind)())
        yield
