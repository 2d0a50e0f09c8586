"""The command line, under its documented path: re-exports of accel-launch."""

from __future__ import annotations

import sys

from accel_launch.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
