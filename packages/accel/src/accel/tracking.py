"""Experiment tracking, under its documented path: re-exports."""

from collections import ChainMap

from accel.trackers.base import GeneralTracker as GeneralTracker
from accel.trackers.base import on_main_process as on_main_process
from accel.trackers.registry import REGISTERED, TRACKERS, tracker_class
from accel.trackers.registry import filter_trackers as filter_trackers
from accel.trackers.registry import get_available_trackers as get_available_trackers
from accel.trackers.registry import register_tracker_class as register_tracker_class
from accel.trackers.systems.aim import AimTracker as AimTracker
from accel.trackers.systems.clearml import ClearMLTracker as ClearMLTracker
from accel.trackers.systems.comet import CometMLTracker as CometMLTracker
from accel.trackers.systems.dvclive import DVCLiveTracker as DVCLiveTracker
from accel.trackers.systems.jsonl import JSONLTracker as JSONLTracker
from accel.trackers.systems.mlflow import MLflowTracker as MLflowTracker
from accel.trackers.systems.swanlab import SwanLabTracker as SwanLabTracker
from accel.trackers.systems.tensorboard import TensorBoardTracker as TensorBoardTracker
from accel.trackers.systems.trackio import TrackioTracker as TrackioTracker
from accel.trackers.systems.wandb import WandBTracker as WandBTracker

LOGGER_TYPE_TO_CLASS: ChainMap[str, type[GeneralTracker]] = ChainMap(
    REGISTERED, {name: tracker_class(name) for name in TRACKERS}
)
"""The classes of trackers by name, also of those that `register_tracker_class` got. What is set registers."""
