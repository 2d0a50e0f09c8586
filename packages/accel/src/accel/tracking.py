"""Experiment tracking, under its documented path: re-exports."""

from accel.trackers.aim import AimTracker as AimTracker
from accel.trackers.base import GeneralTracker as GeneralTracker
from accel.trackers.base import on_main_process as on_main_process
from accel.trackers.clearml import ClearMLTracker as ClearMLTracker
from accel.trackers.comet import CometMLTracker as CometMLTracker
from accel.trackers.dvclive import DVCLiveTracker as DVCLiveTracker
from accel.trackers.jsonl import JSONLTracker as JSONLTracker
from accel.trackers.mlflow import MLflowTracker as MLflowTracker
from accel.trackers.registry import filter_trackers as filter_trackers
from accel.trackers.registry import get_available_trackers as get_available_trackers
from accel.trackers.registry import register_tracker_class as register_tracker_class
from accel.trackers.swanlab import SwanLabTracker as SwanLabTracker
from accel.trackers.tensorboard import TensorBoardTracker as TensorBoardTracker
from accel.trackers.trackio import TrackioTracker as TrackioTracker
from accel.trackers.wandb import WandBTracker as WandBTracker
