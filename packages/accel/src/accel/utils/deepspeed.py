"""What stands between accel and DeepSpeed, under its documented path: re-exports."""

from __future__ import annotations

from accel.ds.config import HfDeepSpeedConfig
from accel.ds.dummies import DummyOptim, DummyScheduler
from accel.ds.runtime import GatheredParameters, deepspeed_required
from accel.ds.wrappers import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "GatheredParameters",
    "HfDeepSpeedConfig",
    "deepspeed_required",
]
