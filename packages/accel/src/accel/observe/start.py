"""Which observers a run has: those of its handlers, and those that the environment asks for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel_state import env
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.observe.base import ObserverKwargs
    from accel.training.run import Run

# The variable that asks for an observer, and its settings; imported when it is set.
_ASKED_BY: dict[str, tuple[str, str]] = {
    "ACCELERATE_GUARD": ("accel.observe.guard.settings", "GuardKwargs"),
    "ACCELERATE_GUARD_BUNDLE": ("accel.observe.guard.settings", "GuardKwargs"),
    "ACCELERATE_REPLAY": ("accel.observe.guard.replay", "ReplayKwargs"),
    "ACCELERATE_STATISTICS": ("accel.observe.statistics", "StatisticsKwargs"),
    "ACCELERATE_VERIFY_FOLDER": ("accel.observe.verify.record", "RecordKwargs"),
    "ACCELERATE_WATCHDOG": ("accel.observe.watchdog", "WatchdogKwargs"),
}


def start_observers(run: Run, settings: Sequence[ObserverKwargs]) -> None:
    """Start the observers of a run.

    Args:
        run: The run, which gets them as `observers`.
        settings: Those of the Accelerator's handlers. What a variable of the environment asks for is added
            with its defaults, unless its settings are among them.
    """
    asked = list(settings)
    for variable, (module, name) in _ASKED_BY.items():
        if env.is_set(variable):
            kind = getattr(importlib.import_module(module), name)
            if not any(isinstance(item, kind) for item in asked):
                asked.append(kind())
    kinds = {kind.__name__ for item in asked for kind in type(item).__mro__}  # by name, to import none
    if env.get("ACCELERATE_WATCHDOG_ABORT") and "WatchdogKwargs" not in kinds:
        warn(
            "ACCELERATE_WATCHDOG_ABORT=true (accel launch --watch_abort) is ignored, as there is no "
            "watchdog: set ACCELERATE_WATCHDOG=120 too (--watch), or pass WatchdogKwargs() as a handler."
        )
    try:
        for item in asked:
            run.observers.append(item.start(run))
    except BaseException:
        # There will be no Accelerator whose end_training stops those that have started.
        while run.observers:
            run.observers.pop().stop()
        raise
