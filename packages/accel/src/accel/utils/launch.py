"""Commands and environments of the launcher, under their documented path: re-exports of accel-launch."""

from __future__ import annotations

from accel_launch.commands.embedding import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from accel_launch.notebook import PrepareForLaunch
from accel_launch.outside.sagemaker.estimator import prepare_sagemager_args_inputs
from accel_launch.outside.tpu.variables import prepare_tpu

__all__ = [
    "PrepareForLaunch",
    "prepare_deepspeed_cmd_env",
    "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
]
