"""The values that an engine is made from, takes and shows; all are frozen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

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
        extra: Objects of the same call that only this engine can prepare (`EngineTraits.loader_types`).
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


class NativeCheckpoint(Protocol):
    """A format of an engine's own in checkpoints, for objects that only the engine can save."""

    def has(self, item: Any) -> bool:
        """Whether it contains a prepared model or optimizer."""

    def save(self, folder: Path, **options: Any) -> None:
        """Write it into a checkpoint; every process calls this.

        Args:
            folder: The checkpoint's folder.
            **options: Additional arguments of `save_state`.
        """

    def check(self, names: Collection[str]) -> None:
        """Reject a checkpoint that the engine cannot load, before anything is changed.

        Args:
            names: The file names of the checkpoint.

        Raises:
            CheckpointError: If the engine cannot load it.
        """

    def load(self, folder: Path, **options: Any) -> None:
        """Load what `save` wrote; every process calls this.

        Args:
            folder: The checkpoint's folder.
            **options: Additional arguments of `load_state`.
        """


@dataclass(frozen=True)
class EngineCheckpoint:
    """How models and optimizers are saved and loaded.

    Attributes:
        format: "full" for the full states, which one process has; "gathered" for full states that FSDP
            gathers, in its format; "sharded" if each process writes its shards.
        native: The engine's own format for prepared objects that only it can save, if it has such objects.
        check: Rejects prepared optimizers whose state cannot be saved, before anything is written; every
            process calls it.
    """

    format: Literal["full", "gathered", "sharded"] = "full"
    native: NativeCheckpoint | None = None
    check: Callable[[Iterable[Any]], None] | None = None


@dataclass(frozen=True)
class EngineTraits:
    """What the rest of accel has to know about an engine: facts that do not change in training.

    Attributes:
        settings_type: For engines of other packages: the class of the settings in `kwargs_handlers` that
            select it.
        takes_gradient: Whether `backward` passes `gradient=` to torch: a window's mean losses are not divided
            then.
        reduces_in_backward: Whether backward reduces gradients unless it runs under `no_sync`; if not,
            `no_sync` is not entered.
        shards_gradients: Whether each process has shards of the gradients, so that in fp16 processes have to
            agree on which steps to skip.
        scales_losses: Whether the engine scales losses by itself in fp16 training.
        rejects_weights: Why `backward(loss, weight=...)` is an error; empty where it is none.
        unsupported_optimizers: Classes of torch.optim whose steps need full tensors, which no process has.
        ignored_handlers: Kwargs handlers that the engine ignores, by their field of `Handlers`, and why.
        loader_types: Types of objects that `prepare` takes as loaders under this engine alone.
        can_save_mid_window: Whether a checkpoint can include the gradients of an open accumulation window.
        saves_collectively: Whether every process has to call `save_state`, as no process has the full state.
        saves_on_all_processes: Whether every process has weights to write; of replicas only the main process.
        splits_layers: Whether processes have different layers of a model.
    """

    settings_type: type | None = None
    takes_gradient: bool = False
    reduces_in_backward: bool = False
    shards_gradients: bool = False
    scales_losses: bool = False
    rejects_weights: str = ""
    unsupported_optimizers: tuple[str, ...] = ()
    ignored_handlers: Mapping[str, str] = field(default_factory=dict)
    loader_types: tuple[type, ...] = ()
    can_save_mid_window: bool = True
    saves_collectively: bool = False
    saves_on_all_processes: bool = False
    splits_layers: bool = False


class UnevenInputs(Protocol):
    """Training in which processes may run out of data."""

    active: bool
    """Whether a `join` context is open now."""

    def join(self, joinables: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """A context in which a process without data participates in the collectives of the others."""


class Sequences(Protocol):
    """Context parallelism."""

    def shard(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: AbstractSet[torch.Tensor] | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which each process of a group has its shard of each sequence.

        Args:
            buffers: Tensors with one entry per token.
            dims: The token dimension of each.
            no_restore: Buffers that keep the shard afterwards.
        """


@dataclass(frozen=True)
class DataParallel:
    """How data is split between processes.

    Attributes:
        rank: The index of this process among those that get different samples.
        size: The number of those.
        mesh: The device mesh, if there is one.
        ranks: The index of each process, unless it is its rank or follows from the mesh.
        reduced_over: The number of processes whose gradients differ and are averaged: those with different
            samples, or with different shards of a sequence. Default: `size`.
        sequences: Shards sequences between processes that work on the same samples; None without
            context parallelism.
        uneven_inputs: Lets processes run out of data; None where `join_uneven_inputs` does nothing.
    """

    rank: int
    size: int
    mesh: DeviceMesh | None = None
    ranks: list[int] | None = None
    reduced_over: int = 0
    sequences: Sequences | None = None
    uneven_inputs: UnevenInputs | None = None

    def __post_init__(self) -> None:
        if not self.reduced_over:
            object.__setattr__(self, "reduced_over", self.size)

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """The index of this process, and the number of processes with different samples."""
        return self.rank, self.size

    def shard_sequences(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: AbstractSet[torch.Tensor] | None,
    ) -> contextlib.AbstractContextManager[None]:
        """See `Sequences.shard`; a no-op without context parallelism."""
        if self.sequences is None:
            return contextlib.nullcontext()
        return self.sequences.shard(buffers, dims, no_restore)
