"""Losses and gradients that are not finite, and loss spikes: noticed, skipped, stopped, and recomputed."""

from accel.observe.guard.errors import GuardError as GuardError
from accel.observe.guard.settings import GuardKwargs as GuardKwargs
