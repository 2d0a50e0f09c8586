"""The parallelism configuration, under its documented path: re-exports of accel-state."""

from __future__ import annotations

from accel_state.parallelism.config import ParallelismConfig

__all__ = [
    "ParallelismConfig",
]
