"""`accel tpu-config`, under its documented path: re-exports of accel-launch."""

from accel_launch.commands.tpu import tpu_command_launcher as tpu_command_launcher
from accel_launch.commands.tpu import tpu_command_parser as tpu_command_parser
