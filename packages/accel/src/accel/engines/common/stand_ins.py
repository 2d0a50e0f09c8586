"""Objects that a script prepares in place of an optimizer or a schedule that an engine makes itself."""

from __future__ import annotations


class OptimizerStandIn:
    """Base of what stands for an optimizer; `prepare` hands it to the engine with the models."""


class SchedulerStandIn:
    """Base of what stands for a schedule; `prepare` asks the engine for the real one."""
