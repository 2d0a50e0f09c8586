"""`python -m accel.commands.config`, which is `accel config`."""

from __future__ import annotations

import sys

from accel_launch.cli import config_main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(config_main())
