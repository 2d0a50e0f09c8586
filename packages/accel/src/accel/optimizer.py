"""The wrapped optimizer, under its documented path: re-exports of accel-optim."""

from accel_optim.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_optim.optimizer import move_to_device as move_to_device
from accel_optim.optimizer import patch_optimizer_step as patch_optimizer_step
