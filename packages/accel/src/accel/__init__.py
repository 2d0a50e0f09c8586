"""Run your own PyTorch training loop on one process or many, in any precision, under any engine.

Importing this package imports nothing else: each public name comes with its module, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.__about__ import __version__ as __version__
from accel_state.lazy import attach

if TYPE_CHECKING:
    from accel.accelerator import Accelerator as Accelerator
    from accel.big_models.empty import init_empty_weights as init_empty_weights
    from accel.big_models.empty import init_on_device as init_on_device
    from accel.plugins.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
    from accel.plugins.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accel_ckpt.loading import load_checkpoint_in_model as load_checkpoint_in_model
    from accel_data.config import DataLoaderConfiguration as DataLoaderConfiguration
    from accel_data.prepare import skip_first_batches as skip_first_batches
    from accel_launch.notebook import debug_launcher as debug_launcher
    from accel_launch.notebook import notebook_launcher as notebook_launcher
    from accel_ops.memory import find_executable_batch_size as find_executable_batch_size
    from accel_ops.random import synchronize_rng_states as synchronize_rng_states
    from accel_optim.handlers import AutocastKwargs as AutocastKwargs
    from accel_optim.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accel_optim.handlers import GradScalerKwargs as GradScalerKwargs
    from accel_state.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from accel_state.enums import DistributedType as DistributedType
    from accel_state.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel_state.handlers import ProfileKwargs as ProfileKwargs
    from accel_state.imports import is_rich_available as is_rich_available
    from accel_state.parallelism import ParallelismConfig as ParallelismConfig
    from accel_state.process import PartialState as PartialState

_NAMES = {
    "accel.accelerator": ("Accelerator",),
    "accel.big_models.empty": ("init_empty_weights", "init_on_device"),
    "accel.plugins.deepspeed": ("DeepSpeedPlugin",),
    "accel.plugins.fsdp": ("FullyShardedDataParallelPlugin",),
    "accel_ckpt.loading": ("load_checkpoint_in_model",),
    "accel_data.config": ("DataLoaderConfiguration",),
    "accel_data.prepare": ("skip_first_batches",),
    "accel_launch.notebook": ("debug_launcher", "notebook_launcher"),
    "accel_ops.memory": ("find_executable_batch_size",),
    "accel_ops.random": ("synchronize_rng_states",),
    "accel_optim.handlers": ("AutocastKwargs", "DistributedDataParallelKwargs", "GradScalerKwargs"),
    "accel_state.enums": ("DDPCommunicationHookType", "DistributedType"),
    "accel_state.handlers": ("InitProcessGroupKwargs", "ProfileKwargs"),
    "accel_state.imports": ("is_rich_available",),
    "accel_state.parallelism": ("ParallelismConfig",),
    "accel_state.process": ("PartialState",),
}
_SUBMODULES = (
    "accelerator",
    "big_modeling",
    "commands",
    "data_loader",
    "engines",
    "launchers",
    "local_sgd",
    "logging",
    "optimizer",
    "parallelism_config",
    "scheduler",
    "state",
    "tracking",
    "utils",
)

__getattr__, __dir__, __all__ = attach(__name__, _NAMES, _SUBMODULES)
