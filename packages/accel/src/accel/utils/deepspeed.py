"""What stands between accel and DeepSpeed, under its documented path: re-exports."""

from __future__ import annotations

from accel.engines.deepspeed.config import HfDeepSpeedConfig
from accel.engines.deepspeed.runtime import GatheredParameters, deepspeed_required
from accel.engines.deepspeed.stand_ins import DummyOptim, DummyScheduler
from accel.engines.deepspeed.wrappers import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)

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
