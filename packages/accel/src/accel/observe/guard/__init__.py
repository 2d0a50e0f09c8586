"""Losses and gradients that are not finite, and loss spikes: noticed, skipped, stopped, and recomputed."""

from accel.observe.guard.errors import GuardError
from accel.observe.guard.settings import GuardKwargs

__all__ = ["GuardError", "GuardKwargs"]
