"""The arguments of an engine and of its `prepare`: values that do not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel.precision.autocast import Precision

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.distributed.device_mesh import DeviceMesh

    from accel.precision.fp8.choice import Fp8
    from accel_optim.handlers import DistributedDataParallelKwargs
    from accel_state.gradient import GradientState
    from accel_state.handlers import TorchDynamoPlugin
    from accel_state.parallelism.config import ParallelismConfig
    from accel_state.process.info import ProcessInfo


@dataclass(frozen=True)
class EngineContext:
    """The settings and facts that an engine is made from; frozen.

    Attributes:
        process: Rank, sizes, device and backend of this process.
        precision: The compute precision and its autocast options.
        gradient_state: The accumulation window's state that optimizers follow.
        scaler: The loss scaler of fp16 training, else None.
        mesh: The device mesh, when a ParallelismConfig asked for one.
        parallelism: The sizes of the mesh's axes.
        settings: What asked for the engine: its plugin, or the settings of another package's engine; None
            where nothing did. Of DeepSpeed, a function that returns the plugin that is active now.
        ddp: Options for DistributedDataParallel.
        dynamo: Options for torch.compile.
        fp8: The library that computes in fp8, when that is the precision.
    """

    process: ProcessInfo
    precision: Precision
    gradient_state: GradientState
    scaler: GradScaler | None = None
    mesh: DeviceMesh | None = None
    parallelism: ParallelismConfig | None = None
    settings: Any = None
    ddp: DistributedDataParallelKwargs | None = None
    dynamo: TorchDynamoPlugin | None = None
    fp8: Fp8 | None = None


@dataclass(frozen=True)
class Prepared:
    """The objects of one `prepare` call that engines care about, in the order given.

    Attributes:
        models: Modules to wrap.
        optimizers: Optimizers over their parameters.
        place_models: Per model, whether it moves to the process's device.
        place_optimizers: Per optimizer, whether a loaded state moves to the parameters' device.
        evaluation_mode: True when the models are only evaluated, so that nothing is set up for gradients.
        schedulers: Schedules of the same call, which are prepared afterwards.
        batch_sizes: Samples per process and micro-batch, of each loader of the same call that says so.
        earlier_batch_size: The smallest of loaders that were prepared before; None without any.
        schedule_moves: How often each optimizer step moves a schedule.
        own: Objects of the same call that this engine alone knows.
        caller: The Accelerator, for code of the user's that an engine hands it to. No engine keeps it.
    """

    models: tuple[torch.nn.Module, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    place_models: tuple[bool, ...] = ()
    place_optimizers: tuple[bool, ...] = ()
    evaluation_mode: bool = False
    schedulers: tuple[Any, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    earlier_batch_size: int | None = None
    schedule_moves: int = 1
    own: tuple[Any, ...] = ()
    caller: Any = None
