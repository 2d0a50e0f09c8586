"""Losses and gradients that are not finite, and loss spikes: noticed, skipped, stopped, and recomputed."""

from accel.observe.guard.settings import GuardError, GuardKwargs

__all__ = ["GuardError", "GuardKwargs"]
