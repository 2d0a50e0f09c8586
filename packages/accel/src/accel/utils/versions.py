"""Versions, under their documented path: re-exports of the packages below."""

from __future__ import annotations

from accel_state.imports.packages import compare_versions, is_torch_version

__all__ = [
    "compare_versions",
    "is_torch_version",
]
