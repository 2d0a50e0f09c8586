"""Config files of the launcher: where they are, what they hold, reading and writing them."""

from __future__ import annotations

from accel_launch.config.file import LaunchConfig, load_config_from_file
from accel_launch.config.paths import config_path, default_config_file
from accel_launch.config.write import write_basic_config

__all__ = [
    "LaunchConfig",
    "config_path",
    "default_config_file",
    "load_config_from_file",
    "write_basic_config",
]
