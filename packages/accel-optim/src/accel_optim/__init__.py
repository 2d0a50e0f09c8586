"""Optimizers, schedules, precision and gradient accumulation for distributed PyTorch."""

from accel_state.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
