"""Merging sharded weights, under its documented path: re-exports of accel-ckpt."""

from __future__ import annotations

import sys

from accel_ckpt.sharded.merge_command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
