"""The launch command, under its documented path: re-exports of accel-launch."""

from __future__ import annotations

import sys

from accel_launch.cli import launch_main as main
from accel_launch.commands.launch import launch_command, launch_command_parser

__all__ = [
    "launch_command",
    "launch_command_parser",
    "main",
]

if __name__ == "__main__":
    sys.exit(main())
