"""Checkpoints and weight files for distributed PyTorch.

Importing this package imports nothing else: each public name comes with its module, on first use.
"""

from accel_state.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
