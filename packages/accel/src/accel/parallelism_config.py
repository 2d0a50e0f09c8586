"""The parallelism configuration, under its documented path: re-exports of accel-state."""

from accel_state.parallelism.config import ParallelismConfig as ParallelismConfig
