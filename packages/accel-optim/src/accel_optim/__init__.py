"""Optimizers, schedules, precision and gradient accumulation for distributed PyTorch."""

from accel_optim.__about__ import __version__
from accel_optim.handlers import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from accel_optim.local_sgd import LocalSGD
from accel_optim.optimizer import AcceleratedOptimizer, move_to_device, patch_optimizer_step
from accel_optim.precision import autocast, get_mixed_precision_context_manager
from accel_optim.scaler import get_grad_scaler
from accel_optim.scheduler import AcceleratedScheduler
from accel_optim.window import Window

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "AutocastKwargs",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "LocalSGD",
    "Window",
    "__version__",
    "autocast",
    "get_grad_scaler",
    "get_mixed_precision_context_manager",
    "move_to_device",
    "patch_optimizer_step",
]
