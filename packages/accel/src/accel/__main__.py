"""`python -m accel` is `accel`, for where the program is not on the PATH."""

from __future__ import annotations

import sys

from accel_launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
