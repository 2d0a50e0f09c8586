"""How training is parallelized: one class, of which an engine overrides what differs.

The defaults fit processes that each have the full model and their own data. An engine is made once per
Accelerator, from a frozen context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from accel.engines.common import gradients
from accel.engines.common.checks import (
    check_elementwise_optimizer,
    check_fp16,
    check_multi_device_training,
    check_offloaded_training,
    mapped_devices,
    named_parameters,
)
from accel.engines.context import (
    DataParallel,
    EngineCheckpoint,
    EngineContext,
    EngineTraits,
    PrepareRequest,
)
from accel.precision.autocast import wrap_forward
from accel.precision.compile import compile_regions
from accel_ops.modules import extract_model_from_parallel, is_compiled_module
from accel_optim.lomo import check_lomo
from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.parameter_map import ParameterMap


class Engine:
    """One process, one device. Other engines override what differs.

    Attributes:
        name: The engine's name, in messages and in `accelerator.plan`.
        traits: Facts about it.
        context: What it was made from.
        data_parallel: How data is split between processes.
        parameters: What trains in the place of each parameter.
    """

    name = "single"
    traits = EngineTraits()
    _follows_parameters = True  # False saves calls in each step where there is nothing to follow or reduce

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        process = context.process
        self.data_parallel = DataParallel(process.rank, process.world_size, context.mesh)
        # Optimizers refer to the engine, so it refers only weakly to what it has prepared.
        self.parameters = ParameterMap()

    # Preparing

    def check(self, request: PrepareRequest) -> None:
        """Reject what this engine cannot train, before anything is changed; every process calls it.

        Raises:
            ValueError: If an object cannot be prepared; the message names it and the fix. With several
                processes all raise if one does.
        """
        has_scaler = self.context.scaler is not None
        for model in request.models:
            check_offloaded_training(model, request.evaluation_mode)
            check_multi_device_training(model, request.evaluation_mode, self.context.process.world_size)
            if has_scaler and not request.evaluation_mode:
                check_fp16(named_parameters(model), self.parameters.trained)
        # Also without a model: optimizers may be prepared separately.
        for optimizer in request.optimizers:
            if has_scaler:
                check_fp16(named_parameters(optimizer), self.parameters.trained)
            check_elementwise_optimizer(optimizer, self.traits.unsupported_optimizers, self.name)
            check_lomo(optimizer, num_processes=self.data_parallel.size, has_scaler=has_scaler)

    def prepare(self, request: PrepareRequest) -> PrepareRequest:
        """Set up models, then optimizers, which need the final parameters; every process calls it."""
        models = zip(request.models, request.place_models, strict=True)
        optimizers = zip(request.optimizers, request.place_optimizers, strict=True)
        return replace(
            request,
            models=tuple(
                self._prepare_model(model, place, request.evaluation_mode) for model, place in models
            ),
            optimizers=tuple(self.setup_optimizer(optimizer, place) for optimizer, place in optimizers),
        )

    def _prepare_model(self, model: torch.nn.Module, place: bool, evaluation_mode: bool) -> torch.nn.Module:
        """Place, convert to fp8, cast, set up and compile one model, in this order."""
        # Before `setup_model`: DDP and FSDP compute on the device of the parameters.
        if place and len(mapped_devices(model)) < 2:  # else its device map has placed it
            model = model.to(self.context.process.device)
        # fp8 layers before anything refers to parameters; autocast on the model's own forward, before DDP or
        # FSDP wraps it; compilation last, to compile the wrapper too.
        self._convert_to_fp8(model, evaluation_mode)
        wrap_forward(model, self.context.precision, self.context.process.device.type)
        if not evaluation_mode:
            model = self.setup_model(model)
        return self._compiled(model)

    def _convert_to_fp8(self, model: torch.nn.Module, evaluation_mode: bool) -> None:
        if self.context.fp8 is not None:
            self.context.fp8.convert(model)

    def _compiled(self, model: torch.nn.Module) -> torch.nn.Module:
        dynamo = self.context.dynamo
        if dynamo is None or dynamo.backend == "NO" or is_compiled_module(model):
            return model
        if dynamo.use_regional_compilation:
            return compile_regions(model, **dynamo.to_kwargs())
        return cast("torch.nn.Module", torch.compile(model, **dynamo.to_kwargs()))

    def setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a model that is on its device in the form that this engine trains; idempotent."""
        return model

    def setup_optimizer(self, optimizer: torch.optim.Optimizer, place: bool) -> torch.optim.Optimizer:
        """Wrap an optimizer to step only at the window's boundary.

        Args:
            optimizer: The optimizer.
            place: Whether a loaded state moves to the device of its parameters.
        """
        return AcceleratedOptimizer(
            optimizer,
            device_placement=place,
            scaler=self.context.scaler,
            gradient_state=self.context.gradient_state,
            gradient_sync=self if self._follows_parameters else None,
        )

    def setup_scheduler(self, scheduler: Any) -> Any | None:
        """The scheduler that replaces this one; None to wrap it in AcceleratedScheduler."""
        return None

    def setup_loader(self, loader: Any, accelerator: Any) -> Any:
        """The loader to shard instead of this one; of `traits.loader_types` the prepared loader.

        Args:
            loader: A DataLoader, or an object of `traits.loader_types`.
            accelerator: The Accelerator, for user code of objects of `traits.loader_types`; None for others.
        """
        return loader

    def wrap_loader(self, loader: Any) -> Any:
        """Wrap a prepared loader whose model was prepared in the same call; idempotent."""
        return loader

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Undo `setup_model`, and on request the precision wrapper and compilation."""
        inner: torch.nn.Module = extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        return inner

    def release(self) -> None:
        """Drop references to prepared objects: they can be freed, and others be prepared."""

    # In a step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass on a loss that is already scaled for the window."""
        if self.context.scaler is not None:
            loss = self.context.scaler.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context in which backward does not reduce the gradients of `model`."""
        return contextlib.nullcontext()

    def reduce_accumulated(self) -> None:
        """Reduce gradients that are not reduced yet, before they are read, clipped or used by a step.

        Such a window's last micro-batch had no backward pass.
        """

    def drop_gradients(self, parameters: Iterable[torch.Tensor] | None = None) -> bool:
        """Drop unreduced gradients that are kept outside of `.grad`.

        Args:
            parameters: The trained tensors; by default all.

        Returns:
            Whether there were any.
        """
        return False

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients accumulated in this window, before its last backward pass reduces them."""
        gradients.multiply(gradients.gradients_of(parameters), factor)

    def clip_gradients(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        clip_value: float | None = None,
    ) -> torch.Tensor | None:
        """Clip gradients by their total norm over all processes, or each element.

        Args:
            parameters: The tensors that train.
            max_norm: The norm to clip to; None to leave gradients as they are.
            norm_type: The p of the p-norm.
            clip_value: Clip each element to [-clip_value, clip_value] instead.

        Returns:
            The norm before clipping; None with `clip_value`, or where it is known only after the step.
        """
        if clip_value is not None:
            gradients.clip_grad_value(parameters, clip_value)
            return None
        return gradients.clip_grad_norm(parameters, max_norm, norm_type)

    # Saving and loading

    @property
    def checkpoint(self) -> EngineCheckpoint:
        """How `save_state` and `load_state` treat models and optimizers now."""
        return EngineCheckpoint()

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's full state on this process, under the names of the unwrapped model when `unwrap`.

        A collective under some engines, which return an empty dict on processes that write nothing.
        """
        if unwrap:
            # Without the name prefixes of wrappers: any engine, and a plain model, can load such a file.
            model = self.unwrap_model(model, keep_torch_compile=False)
        return model.state_dict()

    def to_save(self, item: Any) -> Any:
        """The object to save for a prepared model or optimizer.

        Args:
            item: A model, or an optimizer, for which all processes call this.

        Returns:
            For a model the module whose shards are saved and loaded; for an optimizer the object with its
            full state on the processes that write.
        """
        if isinstance(item, torch.nn.Module):
            return self.unwrap_model(item, keep_torch_compile=False)
        return item

    def to_load(self, item: Any) -> Any:
        """The object to load a full state into, with `state_dict` and `load_state_dict`.

        Args:
            item: A prepared model or optimizer.
        """
        return item


def is_native(engine: Engine, item: Any) -> bool:
    """Whether only the engine's own format saves a prepared model or optimizer."""
    native = engine.checkpoint.native
    return native is not None and native.has(item)
