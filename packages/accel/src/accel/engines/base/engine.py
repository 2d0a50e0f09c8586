"""How training is parallelized: the main class of the engine interface.

The defaults fit processes that each have the full model and their own data; an engine overrides only what it
changes. An engine is created once per Accelerator, from a frozen context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch

from accel.engines.base.context import EngineContext, PrepareRequest
from accel.engines.base.gradients import Gradients
from accel.engines.base.loaders import Loaders
from accel.engines.base.states import States
from accel.engines.common.checks import (
    check_elementwise_optimizer,
    check_fp16,
    check_multi_device_training,
    check_offloaded_training,
    mapped_devices,
    named_parameters,
)
from accel.precision.autocast import wrap_forward
from accel.precision.compile import compile_regions
from accel_ops.modules import extract_model_from_parallel, is_compiled_module
from accel_optim.gradient_sync import GradientSync
from accel_optim.lomo import check_lomo
from accel_optim.optimizer import AcceleratedOptimizer


class Engine:
    """One process, one device. Other engines override what differs.

    Gradients, states and loaders have separate classes, which refer to the engine.
    """

    name = "single"

    gradients_type: ClassVar[type[Gradients]] = Gradients
    states_type: ClassVar[type[States]] = States
    loaders_type: ClassVar[type[Loaders]] = Loaders

    settings_type: ClassVar[type | None] = None
    """For engines of other packages: the class of the settings in `kwargs_handlers` that select it."""

    takes_gradient: ClassVar[bool] = False
    """Whether `backward` passes `gradient=` to torch: a window's mean losses are not divided then."""

    ignored_handlers: ClassVar[Mapping[str, str]] = {}
    """Kwargs handlers that this engine ignores, by their field of `Handlers`, and why."""

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        # Optimizers keep a reference to it, so it must not refer to the engine, and only weakly to models.
        self.gradient_sync = GradientSync()

    @property
    def gradients(self) -> Gradients:
        """How gradients are reduced, scaled and clipped."""
        # Created on each access, which avoids a reference cycle with the engine.
        return self.gradients_type(self)

    @property
    def states(self) -> States:
        """How models and optimizers are saved and loaded."""
        return self.states_type(self)

    @property
    def loaders(self) -> Loaders:
        """How data is split between processes."""
        return self.loaders_type(self)

    def check(self, request: PrepareRequest) -> None:
        """Reject what this engine cannot train, before anything is changed.

        Raises:
            ValueError: If an object cannot be prepared; the message names it and the fix.
        """
        has_scaler = self.context.scaler is not None
        for model in request.models:
            check_offloaded_training(model, request.evaluation_mode)
            check_multi_device_training(model, request.evaluation_mode, self.context.process.world_size)
            if has_scaler and not request.evaluation_mode:
                check_fp16(named_parameters(model), self.gradient_sync.trained_parameter)
        # Also without a model: optimizers may be prepared separately.
        for optimizer in request.optimizers:
            if has_scaler:
                check_fp16(named_parameters(optimizer), self.gradient_sync.trained_parameter)
            check_elementwise_optimizer(optimizer, self.gradients.unsupported_optimizers, self.name)
            check_lomo(optimizer, num_processes=self.loaders.dp_rank_and_size[1], has_scaler=has_scaler)

    def check_collectively(self, request: PrepareRequest) -> None:
        """Run `check` before `prepare`; engines with several processes raise on all ranks if one raises."""
        self.check(request)

    def prepare(self, request: PrepareRequest) -> PrepareRequest:
        """Wrap models, then optimizers, which need the final parameters."""
        models = zip(request.models, request.place_models, strict=True)
        optimizers = zip(request.optimizers, request.place_optimizers, strict=True)
        return replace(
            request,
            models=tuple(
                self.prepare_model(model, place, request.evaluation_mode) for model, place in models
            ),
            optimizers=tuple(self.prepare_optimizer(optimizer, place) for optimizer, place in optimizers),
        )

    def prepare_model(self, model: torch.nn.Module, place: bool, evaluation_mode: bool) -> torch.nn.Module:
        """Place, convert to fp8, cast, wrap and compile one model, in this order."""
        # Before wrapping: DDP and FSDP compute on the device of the parameters.
        if place and len(mapped_devices(model)) < 2:  # else its device map has placed it
            model = model.to(self.context.process.device)
        # fp8 layers before anything refers to parameters; autocast on the model's own forward, before DDP or
        # FSDP wraps it; compilation last, to compile the wrapper too.
        self.convert_model(model, evaluation_mode)
        wrap_forward(model, self.context.precision, self.context.process.device.type)
        if not evaluation_mode:
            model = self.wrap_model(model)
        return self._compiled(model)

    def convert_model(self, model: torch.nn.Module, evaluation_mode: bool) -> None:
        """Replace layers by fp8 layers, in place, if that is the precision."""
        if self.context.fp8 is not None:
            self.context.fp8.convert(model)

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model in the form that this engine trains."""
        return model

    def _compiled(self, model: torch.nn.Module) -> torch.nn.Module:
        dynamo = self.context.dynamo
        if dynamo is None or dynamo.backend == "NO" or is_compiled_module(model):
            return model
        if dynamo.use_regional_compilation:
            return compile_regions(model, **dynamo.to_kwargs())
        return cast("torch.nn.Module", torch.compile(model, **dynamo.to_kwargs()))

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, place: bool) -> torch.optim.Optimizer:
        """Wrap an optimizer to step only at the window's boundary."""
        return AcceleratedOptimizer(
            optimizer,
            device_placement=place,
            scaler=self.context.scaler,
            gradient_state=self.context.gradient_state,
            gradient_sync=self.gradient_sync,
        )

    def prepare_scheduler(self, scheduler: Any) -> Any | None:
        """The scheduler that replaces this one; None to wrap it in AcceleratedScheduler."""
        return None

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Undo `wrap_model`, and on request the precision wrapper and compilation."""
        inner: torch.nn.Module = extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        return inner

    def release(self) -> None:
        """Drop references to prepared objects: they can be freed, and others be prepared."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass on a loss that is already scaled for the window."""
        if self.context.scaler is not None:
            loss = self.context.scaler.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        # Afterwards, when it is known what was not reduced (a retained graph, unfrozen parameters).
        if self.gradient_sync.is_active:
            self.gradient_sync.after_backward(bool(kwargs.get("retain_graph")))
