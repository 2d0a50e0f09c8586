"""The command line, under its documented path: re-exports of accel-launch."""

import sys

from accel_launch.cli import main as main

if __name__ == "__main__":
    sys.exit(main())
