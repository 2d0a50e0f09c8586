"""The arguments of an engine and of its `prepare`: immutable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """The settings and process information that an engine is created with; frozen.

    Attributes:
        process: Rank, sizes, device and backend of this process.
        precision: The compute precision and its autocast options.
        gradient_state: The accumulation window's state, which optimizers read.
        name: The engine's name in the plan.
        scaler: The loss scaler of fp16 training, else None.
        mesh: The device mesh, if a ParallelismConfig requests one.
        mesh_axes: The sizes of the axes that the engine trains on, outermost first.
        parallelism: The sizes of the mesh's axes as they were asked for.
        settings: What selected the engine: its plugin, or the settings of another package's engine; None
            where nothing did. For DeepSpeed, a function that returns the active plugin.
        ddp: Options for DistributedDataParallel.
        dynamo: Options for torch.compile.
        fp8: The library that computes in fp8, if that is the precision.
    """

    process: ProcessInfo
    precision: Precision
    gradient_state: GradientState
    name: str
    scaler: GradScaler | None = None
    mesh: DeviceMesh | None = None
    mesh_axes: Mapping[str, int] = field(default_factory=dict)
    parallelism: ParallelismConfig | None = None
    settings: Any = None
    ddp: DistributedDataParallelKwargs | None = None
    dynamo: TorchDynamoPlugin | None = None
    fp8: Fp8 | None = None


@dataclass(frozen=True)
class PrepareRequest:
    """What one `prepare` call passes to the engine, in the order of its arguments.

    Attributes:
        models: Modules to wrap.
        optimizers: Optimizers over their parameters.
        place_models: Per model, whether it moves to the process's device.
        place_optimizers: Per optimizer, whether a loaded state moves to the device of its parameters.
        evaluation_mode: Whether the models are only evaluated; nothing is set up for gradients then.
        schedulers: Schedulers of the same call, which are prepared afterwards.
        batch_sizes: Samples per process and micro-batch, of each loader of the call with a batch size.
        previous_batch_size: The smallest batch size of loaders that were prepared before; None without any.
        scheduler_steps_per_step: Scheduler steps per optimizer step.
        extra: Objects of the same call that only this engine can prepare (`Loaders.extra_types`).
        accelerator: The Accelerator, for user code that receives it. No engine keeps a reference.
    """

    models: tuple[torch.nn.Module, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    place_models: tuple[bool, ...] = ()
    place_optimizers: tuple[bool, ...] = ()
    evaluation_mode: bool = False
    schedulers: tuple[Any, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    previous_batch_size: int | None = None
    scheduler_steps_per_step: int = 1
    extra: tuple[Any, ...] = ()
    accelerator: Any = None
