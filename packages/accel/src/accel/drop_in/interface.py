"""Which interface accel has."""

from __future__ import annotations

INTERFACE_VERSION = "1.15.0"
"""The release of accelerate whose documented interface accel has; programs compare it."""
