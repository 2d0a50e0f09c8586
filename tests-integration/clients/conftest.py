"""Libraries that import accelerate, in a process where that is accel's name: `hatch run clients:test`."""

from __future__ import annotations

from accel import drop_in

collect_ignore_glob = [] if drop_in.is_active() else ["compare", "test_*.py"]
