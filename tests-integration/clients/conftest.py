"""Libraries that import accelerate, in a process where that is accel's name: `hatch run clients:test`."""

from __future__ import annotations

import sys

collect_ignore_glob = [] if "accelerate_name" in sys.modules else ["test_*.py"]
