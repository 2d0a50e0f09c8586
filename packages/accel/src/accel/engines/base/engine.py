"""How training is parallelized: the first part of the engine interface.

Every default is right for processes that each have the whole model and data of their own, so that an engine
overrides only what it changes. An engine is made once per Accelerator from a frozen context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch

from accel.engines.base.context import EngineContext, Prepared
from accel.engines.base.gradients import Gradients
from accel.engines.base.loaders import Loaders
from accel.engines.base.states import States
from accel.engines.common.checks import (
    check_fp16,
    check_offloaded_training,
    check_spread_training,
    check_whole_tensor_steps,
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

    Gradients, states and loaders have classes of their own, which see the engine.
    """

    name = "single"

    gradients_type: ClassVar[type[Gradients]] = Gradients
    states_type: ClassVar[type[States]] = States
    loaders_type: ClassVar[type[Loaders]] = Loaders

    settings_type: ClassVar[type | None] = None
    """For engines of other packages: the class of the settings that ask for it in `kwargs_handlers`."""

    takes_gradient: ClassVar[bool] = False
    """Whether `backward` passes `gradient=` on to torch: a window's mean losses are not divided then."""

    unread_handlers: ClassVar[Mapping[str, str]] = {}
    """Kwargs handlers, by their field of `Handlers`, that this engine has no use for, and why."""

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        # Who has parameters and gradients. Optimizers keep it, so that it refers to no engine, and to models
        # weakly.
        self.gradient_sync = GradientSync()

    @property
    def gradients(self) -> Gradients:
        """How gradients are reduced, scaled and clipped."""
        # Made anew each time: it holds the engine alone, and so no engine is in a cycle with it.
        return self.gradients_type(self)

    @property
    def states(self) -> States:
        """How models and optimizers are saved and loaded."""
        return self.states_type(self)

    @property
    def loaders(self) -> Loaders:
        """How processes share data."""
        return self.loaders_type(self)

    def check(self, objects: Prepared) -> None:
        """Reject combinations this engine cannot train, before anything is changed.

        Raises:
            ValueError: If some object cannot be prepared; the message names it and the fix.
        """
        has_scaler = self.context.scaler is not None
        for model in objects.models:
            check_offloaded_training(model, objects.evaluation_mode)
            check_spread_training(model, objects.evaluation_mode, self.context.process.world_size)
            if has_scaler and not objects.evaluation_mode:
                check_fp16(named_parameters(model), self.gradient_sync.trained_parameter)
        # Also where no model comes with it: optimizers may be prepared by themselves.
        for optimizer in objects.optimizers:
            if has_scaler:
                check_fp16(named_parameters(optimizer), self.gradient_sync.trained_parameter)
            check_whole_tensor_steps(optimizer, self.gradients.unsupported_optimizers, self.name)
            check_lomo(optimizer, num_processes=self.loaders.data_shard[1], has_scaler=has_scaler)

    def check_together(self, objects: Prepared) -> None:
        """Check before `prepare`; engines whose processes train one model raise on all if one raises."""
        self.check(objects)

    def prepare(self, objects: Prepared) -> Prepared:
        """Wrap models and optimizers; models first, so that optimizers see the final parameters."""
        models = zip(objects.models, objects.place_models, strict=True)
        optimizers = zip(objects.optimizers, objects.place_optimizers, strict=True)
        return replace(
            objects,
            models=tuple(self.prepare_model(model, put, objects.evaluation_mode) for model, put in models),
            optimizers=tuple(self.prepare_optimizer(optimizer, put) for optimizer, put in optimizers),
        )

    def prepare_model(self, model: torch.nn.Module, place: bool, evaluation_mode: bool) -> torch.nn.Module:
        """Place, convert to fp8, cast, wrap and compile one model, in this order."""
        # Before wrapping: DDP and FSDP take the device of parameters for that of computation.
        if place and len(mapped_devices(model)) < 2:  # a device map that spreads it has placed it
            model = model.to(self.context.process.device)
        # fp8 layers before anything keeps parameters; autocast on the model's own forward, before another
        # object (DDP, FSDP) wraps it; compilation last, so that the wrapper is compiled too.
        self.convert_model(model, evaluation_mode)
        wrap_forward(model, self.context.precision, self.context.process.device.type)
        if not evaluation_mode:
            model = self.wrap_model(model)
        return self._compiled(model)

    def convert_model(self, model: torch.nn.Module, evaluation_mode: bool) -> None:
        """Replace layers by those of fp8, in place, when that is the precision."""
        if self.context.fp8 is not None:
            self.context.fp8.convert(model)

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model as it trains under this engine."""
        return model

    def _compiled(self, model: torch.nn.Module) -> torch.nn.Module:
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
            gradient_sync=self.gradient_sync,
        )

    def prepare_scheduler(self, scheduler: Any) -> Any | None:
        """The schedule that takes this one's place; None to wrap it in AcceleratedScheduler."""
        return None

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Undo `wrap_model` (and on request the precision wrapper and compilation)."""
        inner: torch.nn.Module = extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        return inner

    def release(self) -> None:
        """Drop the references to prepared objects, so that they are freed and others can be prepared."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass on a loss that is already scaled for the window."""
        if self.context.scaler is not None:
            loss = self.context.scaler.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        # After it, as what was left out is known by now alone (a graph that is kept, parameters that were
        # unfrozen).
        if self.gradient_sync.is_active:
            self.gradient_sync.after_backward(bool(kwargs.get("retain_graph")))
