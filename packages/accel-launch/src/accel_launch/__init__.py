"""One launcher for every PyTorch setup: the command `accel`, and launch functions for notebooks and tests.

Importing this package, and starting a script with it, does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_launch.__about__ import __version__
from accel_state.lazy import attach

if TYPE_CHECKING:
    from accel_launch.command import launch_command, launch_command_parser
    from accel_launch.config import default_config_file, load_config_from_file, write_basic_config
    from accel_launch.errors import ConfigError, LaunchError, NotAvailableError
    from accel_launch.notebook import PrepareForLaunch, debug_launcher, notebook_launcher

__all__ = [
    "ConfigError",
    "LaunchError",
    "NotAvailableError",
    "PrepareForLaunch",
    "__version__",
    "debug_launcher",
    "default_config_file",
    "launch_command",
    "launch_command_parser",
    "load_config_from_file",
    "notebook_launcher",
    "write_basic_config",
]

__getattr__, __dir__, _ = attach(
    __name__,
    {
        "accel_launch.command": ("launch_command", "launch_command_parser"),
        "accel_launch.config": ("default_config_file", "load_config_from_file", "write_basic_config"),
        "accel_launch.errors": ("ConfigError", "LaunchError", "NotAvailableError"),
        "accel_launch.notebook": ("PrepareForLaunch", "debug_launcher", "notebook_launcher"),
    },
)
