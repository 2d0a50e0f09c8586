"""Reading config files, under its documented path: re-exports of accel-launch."""

from __future__ import annotations

from accel_launch.config.file import load_config_from_file
from accel_launch.config.paths import default_config_file

__all__ = ["default_config_file", "load_config_from_file"]
