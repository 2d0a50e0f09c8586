"""Config files, under their documented path: re-exports of accel-launch."""

from __future__ import annotations

from accel_launch.cli import config_main as main
from accel_launch.config import default_config_file
from accel_launch.config.file import load_config_from_file
from accel_launch.config.write import write_basic_config

__all__ = [
    "default_config_file",
    "load_config_from_file",
    "main",
    "write_basic_config",
]
