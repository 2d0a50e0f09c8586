"""Experiment tracking, under its documented path: re-exports."""

from __future__ import annotations

from accel.trackers.aim import AimTracker
from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.clearml import ClearMLTracker
from accel.trackers.comet import CometMLTracker
from accel.trackers.dvclive import DVCLiveTracker
from accel.trackers.jsonl import JSONLTracker
from accel.trackers.mlflow import MLflowTracker
from accel.trackers.registry import filter_trackers, get_available_trackers, register_tracker_class
from accel.trackers.swanlab import SwanLabTracker
from accel.trackers.tensorboard import TensorBoardTracker
from accel.trackers.trackio import TrackioTracker
from accel.trackers.wandb import WandBTracker

__all__ = [
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JSONLTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]
