"""Loggers, under their documented path: re-exports of accel-state."""

from __future__ import annotations

from accel_state.logging.loggers import MultiProcessAdapter, get_logger

__all__ = [
    "MultiProcessAdapter",
    "get_logger",
]
