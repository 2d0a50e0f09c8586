"""Versions, under their documented path: re-exports of the packages below."""

from accel_state.imports.packages import compare_versions as compare_versions
from accel_state.imports.packages import is_torch_version as is_torch_version
