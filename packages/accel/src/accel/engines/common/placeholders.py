"""Objects that a script prepares in place of an optimizer or a schedule that an engine makes itself."""

from __future__ import annotations


class PlaceholderOptimizer:
    """Base of what stands for an optimizer; `prepare` hands it to the engine with the models."""


class PlaceholderScheduler:
    """Base of what stands for a schedule; `prepare` asks the engine for the real one."""
