"""The error that the guard stops with."""

from __future__ import annotations


class GuardError(RuntimeError):
    """A loss or gradient is not finite, or a loss is a spike, and the guard's action is "stop"."""
