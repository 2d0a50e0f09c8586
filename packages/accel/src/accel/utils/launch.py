"""Commands and environments of the launcher, under their documented path: re-exports of accel-launch."""

from accel_launch.commands.embedding import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from accel_launch.commands.embedding import prepare_multi_gpu_env as prepare_multi_gpu_env
from accel_launch.commands.embedding import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
from accel_launch.launchers.sagemaker.estimator import (
    prepare_sagemager_args_inputs as prepare_sagemager_args_inputs,
)
from accel_launch.launchers.tpu.variables import prepare_tpu as prepare_tpu
from accel_launch.notebook import PrepareForLaunch as PrepareForLaunch
