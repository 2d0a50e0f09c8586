"""Launch functions, under their documented path: re-exports of accel-launch."""

from __future__ import annotations

from accel_launch.commands.embedding import test_launch
from accel_launch.notebook import debug_launcher, notebook_launcher

__all__ = [
    "debug_launcher",
    "notebook_launcher",
    "test_launch",
]
