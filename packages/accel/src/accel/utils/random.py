"""Random number generators, under their documented path: re-exports of the packages below."""

from accel_ops.rng import set_seed as set_seed
from accel_ops.rng import synchronize_rng_state as synchronize_rng_state
from accel_ops.rng import synchronize_rng_states as synchronize_rng_states
