"""One launcher for every PyTorch setup: the command `accel`, and launch functions for notebooks and tests.

Importing this package, and starting a script with it, does not import torch.
"""

from accel_state.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
