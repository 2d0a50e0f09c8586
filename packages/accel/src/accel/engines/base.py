"""The engine seam: how training is parallelized, behind one narrow base class.

Every default is right for one process, so that an engine overrides only what it changes. An engine is made
once per Accelerator from a frozen context and touches models, optimizers and gradients; loaders,
collectives and files stay functions of their own packages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch

from accel.engines.common.checks import (
    mapped_devices,
    refuse_foreign,
    refuse_fp16_parameters,
    refuse_fp16_parameters_of,
    refuse_offloaded_training,
    refuse_spread_training,
    refuse_whole_tensor_steps,
)
from accel.engines.context import EngineContext, Prepared
from accel.models.precision import wrap_forward
from accel.models.regions import compile_regions
from accel_ops.collectives import operations
from accel_ops.modules import extract_model_from_parallel, is_compiled_module
from accel_optim.lomo import refuse_lomo
from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.owner import ParameterOwner
from accel_optim.scaler import get_fsdp2_grad_scaler, get_grad_scaler
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


__all__ = ["Engine", "Joining"]


@dataclass
class Joining:
    """Whether processes that are out of data are shadowed now; loaders share it with their engine."""

    active: bool = False


class Engine:
    """One process, one device. Other engines override what differs."""

    name = "single"

    settings_type: ClassVar[type | None] = None
    """For engines of other packages: the class of the settings that ask for it in `kwargs_handlers`."""

    gradient_reduction: Literal["mean", "sum"] = "mean"
    """What the gradients of the processes of `data_shard` become: their mean or their sum."""

    gradients_in_parts: ClassVar[bool] = False
    """Whether processes hold parts of gradients, so that they have to agree on what is left out in fp16."""

    unread_handlers: ClassVar[Mapping[str, str]] = {}
    """Kwargs handlers, by their field of `Handlers`, that this engine has no use for, and why."""

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        self.owner = self.make_owner()

    @classmethod
    def make_scaler(cls, device_type: str, **options: Any) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16 training, or None if the engine scales losses by itself.

        Args:
            device_type: Type of the device that losses are on.
            **options: Those of torch.amp.GradScaler.
        """
        if cls.gradients_in_parts:
            return get_fsdp2_grad_scaler(device_type=device_type, **options)
        return get_grad_scaler(device_type=device_type, **options)

    def make_owner(self) -> ParameterOwner:
        """Who has parameters and gradients; it holds models weakly, and no engine, as optimizers keep it."""
        return ParameterOwner()

    keeps_open_window = True
    """Whether the gradients of an open accumulation window are where a checkpoint finds them."""

    @property
    def saves_parts(self) -> bool:
        """Whether each process writes its own part of models and optimizers into a checkpoint."""
        return False

    @property
    def refused_optimizers(self) -> tuple[str, ...]:
        """Classes of torch.optim whose steps need tensors that no process has whole here."""
        return ()

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh, where processes are arranged in one."""
        return self.context.mesh

    @property
    def data_shard(self) -> tuple[int, int]:
        """(rank, size) along the data-parallel dimension; the loaders shard by it."""
        return 0, 1

    @property
    def data_ranks(self) -> list[int] | None:
        """The rank along that dimension of each process, where it is neither its own nor said by the mesh."""
        return None

    @property
    def gradient_shards(self) -> int:
        """Processes whose gradients are reduced together: they have data, or parts of it, of their own."""
        return self.data_shard[1]

    def check(self, objects: Prepared) -> None:
        """Refuse combinations this engine cannot train, before anything is changed.

        Raises:
            ValueError: If some object cannot be prepared; the message names it and the fix.
        """
        for model in objects.models:
            refuse_offloaded_training(model, objects.evaluation_mode)
            refuse_spread_training(model, objects.evaluation_mode, self.context.process.world_size)
            if self.context.scaler is not None and not objects.evaluation_mode:
                refuse_fp16_parameters(model, self.owner.present)
        for optimizer in objects.optimizers:
            has_scaler = self.context.scaler is not None
            if has_scaler:
                refuse_fp16_parameters_of(optimizer, self.owner.present)
            refuse_whole_tensor_steps(optimizer, self.refused_optimizers, self.name)
            refuse_lomo(optimizer, num_processes=self.data_shard[1], has_scaler=has_scaler)

    def check_together(self, objects: Prepared) -> None:
        """Check before `prepare`; engines whose processes go on together refuse on all what one refuses."""
        self.check(objects)

    def prepare(self, objects: Prepared) -> Prepared:
        """Wrap models and optimizers; models first, so that optimizers see the final parameters."""
        if self.context.fp8 is not None:
            objects = self.context.fp8.initialize(objects)
        place = objects.place_models or (True,) * len(objects.models)
        models = tuple(
            self.prepare_model(model, put, objects.evaluation_mode)
            for model, put in zip(objects.models, place, strict=True)
        )
        place = objects.place_optimizers or (True,) * len(objects.optimizers)
        optimizers = tuple(
            self.prepare_optimizer(optimizer, put)
            for optimizer, put in zip(objects.optimizers, place, strict=True)
        )
        return replace(objects, models=models, optimizers=optimizers)

    def prepare_model(self, model: torch.nn.Module, place: bool, evaluation_mode: bool) -> torch.nn.Module:
        """Place, convert to fp8, cast, wrap and compile one model, in this order."""
        if place and len(mapped_devices(model)) < 2:  # a device map that spreads it has placed it
            model = model.to(self.context.process.device)
        self.convert_model(model, evaluation_mode)
        wrap_forward(model, self.context.precision, self.context.process.device.type)
        if not evaluation_mode:
            model = self.wrap_model(model)
        return self.compile_model(model)

    def convert_model(self, model: torch.nn.Module, evaluation_mode: bool) -> None:
        """Replace layers by those of fp8, in place, when that is the precision."""
        if self.context.fp8 is not None:
            self.context.fp8.convert(model)

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model as it trains under this engine."""
        return model

    def compile_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Compile the model when a dynamo backend was chosen; last, so that the wrapper is compiled too."""
        dynamo = self.context.dynamo
        if dynamo is None or dynamo.backend == "NO" or is_compiled_module(model):
            return model
        if dynamo.use_regional_compilation:
            return compile_regions(model, **dynamo.to_kwargs())
        return cast("torch.nn.Module", torch.compile(model, **dynamo.to_kwargs()))

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, place: bool) -> torch.optim.Optimizer:
        """Wrap an optimizer so that it steps at the window's boundary only."""
        return AcceleratedOptimizer(
            optimizer,
            device_placement=place,
            scaler=self.context.scaler,
            gradient_state=self.context.gradient_state,
            owner=self.owner,
        )

    def prepare_scheduler(self, scheduler: Any) -> Any | None:
        """The schedule that takes this one's place; None for AcceleratedScheduler around it."""
        return None

    def loader_to_prepare(self, loader: Any) -> Any:
        """The loader whose batches are shared out, in the place of one that is to be prepared."""
        return loader

    own_kinds: tuple[type, ...] = ()
    """Types of objects that this engine alone prepares."""

    def prepare_own(self, item: Any, caller: Any) -> Any:
        """The prepared form of an object of `own_kinds`, for an Accelerator."""
        raise NotImplementedError

    def share_loader(self, loader: Any) -> Any:
        """A prepared loader as it feeds a model that was prepared in the same call."""
        return loader

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Undo `wrap_model` (and on request the precision wrapper and compilation)."""
        inner: torch.nn.Module = extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        return inner

    def release(self) -> None:
        """Let go of what was prepared, so that it can be freed, and other objects be prepared."""

    @property
    def holds_gradients_back(self) -> bool:
        """Whether `no_sync` does something; where it does not, nobody enters it."""
        return False

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context in which backward leaves the gradients of `model` unsynchronised."""
        return contextlib.nullcontext()

    def context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: AbstractSet[torch.Tensor] | None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which each process of a group has its part of sequences; nothing without such groups.

        Args:
            buffers: Tensors with one entry per token.
            dims: Their dimensions of tokens.
            no_restore: Those that keep the part afterwards.
        """
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass on a loss that is already scaled for the window."""
        if self.context.scaler is not None:
            loss = self.context.scaler.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        self.owner.after_backward(bool(kwargs.get("retain_graph")))

    def total_weight(self, weight: float | torch.Tensor, dtype: torch.dtype) -> float | torch.Tensor:
        """Add up a weight over the processes whose gradients are reduced together.

        Args:
            weight: A number, or a tensor without dimensions on the accelerator.
            dtype: The precision of tensors.

        Returns:
            The same on all processes: a number where the host knows it without waiting, else a tensor.
        """
        return weight.to(dtype) if isinstance(weight, torch.Tensor) else weight

    def sum_weight(self, weight: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Add up a weight over all processes, in one small collective."""
        process = self.context.process
        if not isinstance(weight, torch.Tensor):
            weight = torch.full((), weight, dtype=dtype, device=process.device)  # no copy, no wait
        total: torch.Tensor = operations.reduce(weight.to(process.device, dtype), "sum", process=process)
        return total

    @torch.no_grad()
    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients gathered in this window, before its last backward pass reduces them."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                gradient = gradient._values()  # also of one that is not coalesced
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, gradients in by_device.items():
            own = factor.to(device, non_blocking=True) if isinstance(factor, torch.Tensor) else factor
            torch._foreach_mul_(gradients, own)

    def with_gradients(self, parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
        """The tensors that have the gradients of parameters: these themselves, as a rule."""
        return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)

    def grad_norm(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """The total norm of the gradients as they are now."""
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return torch.nn.utils.get_total_norm(
            [tensor.grad for tensor in tensors if tensor.grad is not None], norm_type
        )

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip gradients by their total norm; returns the norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value]."""
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        clipped = [tensor for tensor in tensors if tensor.grad is not None]
        if clipped:  # torch 2.13 fails on none
            torch.nn.utils.clip_grad_value_(clipped, clip_value)

    @property
    def saves_model(self) -> bool:
        """Whether this process holds weights to be written; of replicas, the main one alone does."""
        return self.context.process.is_main

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's full state on this process, under the names of the unwrapped model when `unwrap`."""
        if unwrap:
            model = self.unwrap_model(model, keep_torch_compile=False)
        return model.state_dict()

    def state_root(self, model: torch.nn.Module) -> torch.nn.Module:
        """The part of a prepared model that its parts are saved from and loaded into."""
        return self.unwrap_model(model, keep_torch_compile=False)

    def model_to_load(self, model: torch.nn.Module) -> Any:
        """What a full state is loaded into: it has a state_dict and a load_state_dict."""
        return model

    def check_save(self, optimizers: Iterable[Any]) -> None:
        """Refuse what cannot be saved, before anything is written.

        Raises:
            ValueError: With the reason and the alternative.
        """

    def optimizer_to_save(self, optimizer: torch.optim.Optimizer) -> Any:
        """What has the optimizer's full state on the processes that write; all processes call it."""
        return optimizer

    def optimizer_to_load(self, optimizer: torch.optim.Optimizer) -> Any:
        """What a full optimizer state is loaded into."""
        return optimizer

    def is_own(self, item: Any) -> bool:
        """Whether a prepared model or optimizer is saved by `save_own`, and by nobody else."""
        return False

    def save_own(self, folder: Path, **options: Any) -> None:
        """Write what the engine saves by itself into a checkpoint; every process calls it.

        Args:
            folder: The checkpoint's folder.
            **options: What `save_state` was given for it; an engine that takes none tells so.
        """
        if options:
            warn(
                f"save_state ignores {', '.join(options)}: the {self.name} engine saves without options.",
            )

    def check_own(self, names: Collection[str]) -> None:
        """Refuse a checkpoint that the engine cannot go on from, before anything is changed.

        Args:
            names: Its files.

        Raises:
            CheckpointError: If it cannot.
        """
        refuse_foreign(names, self.name)

    def load_own(self, folder: Path, **options: Any) -> None:
        """Load what `save_own` wrote; every process calls it.

        Args:
            folder: The checkpoint's folder.
            **options: What `load_state` was given for it.
        """

    joining: Joining | None = None
    """Whether `join` is at work; None where it does nothing, of which the caller is told."""

    def join(self, joinables: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """A context for training on uneven inputs; nothing to do where no collective runs in backward."""
        return contextlib.nullcontext()
