"""`accel to-fsdp2`, under its documented path: re-exports of accel-launch."""

from accel_launch.commands.to_fsdp2 import to_fsdp2_command as to_fsdp2_command
from accel_launch.commands.to_fsdp2 import to_fsdp2_command_parser as to_fsdp2_command_parser
