"""Random number generators, under their documented path: re-exports of the packages below."""

from __future__ import annotations

from accel_ops.rng import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = [
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]
