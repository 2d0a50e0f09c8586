"""The wrapped optimizer, under its documented path: re-exports of accel-optim."""

from __future__ import annotations

from accel_optim.optimizer import AcceleratedOptimizer, move_to_device, patch_optimizer_step

__all__ = [
    "AcceleratedOptimizer",
    "move_to_device",
    "patch_optimizer_step",
]
