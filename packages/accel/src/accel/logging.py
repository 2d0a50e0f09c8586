"""Loggers, under their documented path: re-exports of accel-state."""

from accel_state.logging.loggers import MultiProcessAdapter as MultiProcessAdapter
from accel_state.logging.loggers import get_logger as get_logger
