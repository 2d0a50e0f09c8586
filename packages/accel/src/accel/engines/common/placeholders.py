"""Placeholders that a script prepares where the engine creates the optimizer or scheduler itself."""

from __future__ import annotations


class PlaceholderOptimizer:
    """Base of placeholders for an optimizer; `prepare` passes it to the engine with the models."""


class PlaceholderScheduler:
    """Base of placeholders for a scheduler; `prepare` gets the real one from the engine."""
