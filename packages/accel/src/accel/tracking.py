"""Experiment tracking, under its documented path: re-exports."""

from __future__ import annotations

from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.registry import filter_trackers, get_available_trackers, register_tracker_class
from accel.trackers.tensorboard import TensorBoardTracker

__all__ = [
    "GeneralTracker",
    "TensorBoardTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]
