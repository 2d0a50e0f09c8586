"""Everything documented under `accel.utils`: lazy re-exports, each imported on first use."""

from accel_state.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
