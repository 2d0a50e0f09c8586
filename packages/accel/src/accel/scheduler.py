"""The wrapped scheduler, under its documented path: re-exports of accel-optim."""

from __future__ import annotations

from accel_optim.scheduler import AcceleratedScheduler

__all__ = [
    "AcceleratedScheduler",
]
