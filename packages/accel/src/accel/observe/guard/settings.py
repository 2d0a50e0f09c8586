"""The settings of the guard."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.observe.base import ObserverKwargs
from accel_state import env
from accel_state.env.fields import from_env, read_environment
from accel_state.step_events import Observer

if TYPE_CHECKING:
    from accel.training.run import Run

_ACTIONS = ("warn", "skip", "stop")


@dataclass
class GuardKwargs(ObserverKwargs):
    """Notice a loss or gradient that is not finite, and loss spikes, on any process.

    Losses are read where `backward` gets them, and gradients once they are complete: at the end of an
    accumulation window, reduced over the processes, and before they are clipped. The processes agree in one
    small collective at each optimizer step, for which an accelerator is waited for. Gradients of fp16 that
    overflow are the scaler's to skip, and not reported as long as the loss scale is above 1. Where the
    optimizer gets a closure (LBFGS), the first call of each step is judged.

    Args:
        action: "warn", "skip" (the step, on all processes: gradients are dropped, and the schedule does not
            move; buffers keep what the forward pass made of them) or "stop" (GuardError on all processes);
            default: ACCELERATE_GUARD, then "warn".
        bundle: A folder for what recomputes the loss (`accel replay`): the batches of the window, the states
            of the random generators, and a checkpoint, in `step_<number>`; default: ACCELERATE_GUARD_BUNDLE,
            then none.
        max_bundles: How many bundles are written in one run.
        spike: A loss is a spike on a process where its mean over the window is more than this many times the
            median of the last `spike_window` steps' losses (means over all processes; from 10 of them on);
            default: spikes are not looked for.
        spike_window: Steps of that median.
        check_gradients: Whether to check gradients too, not only losses.

    Raises:
        ValueError: If a value is out of range.
    """

    action: str | None = from_env("ACCELERATE_GUARD")
    bundle: str | os.PathLike[str] | None = from_env("ACCELERATE_GUARD_BUNDLE")
    max_bundles: int = 1
    spike: float | None = None
    spike_window: int = 100
    check_gradients: bool = True

    def __post_init__(self) -> None:
        read_environment(self)
        if self.action is None:
            self.action = "warn"
        if self.action not in _ACTIONS:
            raise ValueError(
                f"GuardKwargs got action={self.action!r}; it takes {', '.join(map(repr, _ACTIONS))}."
            )
        if self.bundle is not None and not isinstance(self.bundle, (str, os.PathLike)):
            raise ValueError(
                f"GuardKwargs got bundle={self.bundle!r}; it takes the path of a folder, or None."
            )
        # bool is an int to isinstance.
        is_factor = isinstance(self.spike, (int, float)) and not isinstance(self.spike, bool)
        if self.spike is not None and not (is_factor and self.spike > 1):
            raise ValueError(f"GuardKwargs got spike={self.spike!r}; it takes a factor above 1, or None.")
        # 10: as many losses as make a median.
        for name, least in (("max_bundles", 1), ("spike_window", 10)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"GuardKwargs got {name}={value!r}; it takes an integer of at least {least}."
                )

    def start(self, run: Run) -> Observer:
        """Make the guard of a run; a run that is replayed has none."""
        if env.is_set("ACCELERATE_REPLAY"):
            return Observer()
        from accel.observe.guard.guard import Guard

        return Guard(run, self)
