"""Availability checks, under their documented path: re-exports of the packages below."""

from accel_state.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
