"""Merging sharded weights, under its documented path: re-exports of accel-ckpt."""

import sys

from accel_ckpt.sharded.merge_command import main as main

if __name__ == "__main__":
    sys.exit(main())
