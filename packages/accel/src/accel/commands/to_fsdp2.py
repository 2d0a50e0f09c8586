"""`accel to-fsdp2`, under its documented path: re-exports of accel-launch."""

from __future__ import annotations

from accel_launch.commands.to_fsdp2 import to_fsdp2_command, to_fsdp2_command_parser

__all__ = ["to_fsdp2_command", "to_fsdp2_command_parser"]
