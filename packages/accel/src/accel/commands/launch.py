"""The launch command, under its documented path: re-exports of accel-launch."""

from __future__ import annotations

from accel_launch.commands.launch import launch_command, launch_command_parser

__all__ = [
    "launch_command",
    "launch_command_parser",
]
