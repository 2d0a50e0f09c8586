"""`accel tpu-config`, under its documented path: re-exports of accel-launch."""

from __future__ import annotations

from accel_launch.commands.tpu import tpu_command_launcher, tpu_command_parser

__all__ = ["tpu_command_launcher", "tpu_command_parser"]
