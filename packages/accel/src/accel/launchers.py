"""Launch functions, under their documented path: re-exports of accel-launch."""

from __future__ import annotations

from accel_launch.notebook import debug_launcher, notebook_launcher
from accel_launch.plan.embedding import test_launch

__all__ = [
    "debug_launcher",
    "notebook_launcher",
    "test_launch",
]
