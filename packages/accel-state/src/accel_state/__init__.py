"""Process state and hardware facts for distributed PyTorch: who am I, where do I run.

Importing this package imports nothing else: each public name comes with its module, on first use, so that a
launcher can read the torch-free ones in milliseconds.
"""

from accel_state.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
