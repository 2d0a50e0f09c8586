"""DeepSpeed: ZeRO's stages 0 to 3 behind the same five lines."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel.engines.base import Engine
from accel.engines.common.create_graph import reject_create_graph
from accel.engines.common.layouts import check_layout, check_sparse, is_split
from accel.engines.common.standalone import parameters_of
from accel.engines.context import EngineCheckpoint, EngineContext, EngineTraits, PrepareRequest
from accel.engines.deepspeed import checkpoint, gradients, ulysses, weights
from accel.engines.deepspeed.auto_values import PrepareInfo, complete
from accel.engines.deepspeed.placeholders import DummyOptim, DummyScheduler
from accel.engines.deepspeed.runtime import import_deepspeed, load, started
from accel.engines.deepspeed.settings import check_axes, check_precision
from accel.engines.deepspeed.wrappers import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)
from accel.precision.autocast import wrap_forward
from accel.precision.compile import compile_regions_deepspeed
from accel_optim.parameter_map import ParameterMap

if TYPE_CHECKING:
    from accel.engines.deepspeed.plugin import DeepSpeedPlugin


class DeepSpeedCheckpoint:
    """DeepSpeed's own format, of the trained model and its optimizer.

    Args:
        driver: What runs DeepSpeed's engine.
    """

    def __init__(self, driver: DeepSpeedEngineWrapper) -> None:
        self._driver = driver

    def has(self, item: Any) -> bool:
        """Whether it is the trained model, or its optimizer."""
        return item is self._driver.engine or getattr(item, "driver", None) is self._driver

    def save(self, folder: Path, **options: Any) -> None:
        """Write DeepSpeed's checkpoint, with options of its `save_checkpoint`."""
        if weights.steps_copies(self._driver.engine):
            weights.copy_changes(self._driver.engine)  # DeepSpeed saves its copies too
        checkpoint.save(self._driver.engine, folder, options)

    def check(self, names: Collection[str]) -> None:
        """Reject a checkpoint that DeepSpeed cannot load here, before anything is changed."""
        checkpoint.check(self._driver.engine, names)

    def load(self, folder: Path, **options: Any) -> None:
        """Load DeepSpeed's checkpoint, with options of its `load_checkpoint`."""
        checkpoint.load(self._driver.engine, folder, options)


class ZeroParameters(ParameterMap):
    """Parameters that ZeRO stage 3 may shard."""

    def is_shard(self, tensor: torch.Tensor) -> bool:
        """Whether it is sharded, and empty outside of its layer."""
        return hasattr(tensor, "ds_tensor")


class DeepSpeedEngine(Engine):
    """A DeepSpeed engine trains one model; other models are evaluated.

    A model that is prepared without an optimizer is evaluated: at stage 3 by an engine that shards its
    parameters, at other stages unchanged.
    """

    # `reduces_in_backward` is False although stages 2 and 3 do: the window tells `backward` whether a step
    # follows, without `no_sync`.
    traits = EngineTraits(
        scales_losses=True,
        can_save_mid_window=False,
        saves_collectively=True,
        ignored_handlers={
            "ddp": "gradients are reduced without DistributedDataParallel, whose options can be left out",
            "scaler": "DeepSpeed scales losses itself. Set the section 'fp16' of its configuration",
        },
    )

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.parameters = ZeroParameters()
        plugin = self.plugin
        check_axes(context, plugin.zero_stage)
        plugin.forget_filled()
        plugin.set_mixed_precision(context.precision.name)
        # With the stage, which matters in errors and warnings.
        self.name = f"deepspeed zero {plugin.zero_stage}"
        load(context.process.device)
        has_fp16 = import_deepspeed("accelerator").get_accelerator().is_fp16_supported()
        check_precision(context, plugin.zero_stage, has_fp16)
        plugin.selected = True  # a single plugin is active too
        # Only one: backward is a method of DeepSpeed's engine, and accelerator.backward only takes a loss.
        self._driver: DeepSpeedEngineWrapper | None = None
        self._schedules: list[tuple[Any, Any]] = []
        self._groups: Any = None

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The active plugin."""
        plugin: DeepSpeedPlugin = self.context.settings()
        return plugin

    @property
    def _sequence_parallel_size(self) -> int:
        config = self.context.parallelism
        return (config.sp_size or 1) if config is not None else 1

    # Preparing

    def check(self, request: PrepareRequest) -> None:
        """Reject what DeepSpeed cannot train, and a configuration that does not fit the prepared objects."""
        stage = self.plugin.zero_stage
        # From stage 1 on the optimizer steps flat vectors of parameters; another plugin may be active by now.
        unsupported = ("LBFGS", "Adafactor", "Muon") if stage else ()
        self.traits = replace(self.traits, unsupported_optimizers=unsupported)
        super().check(request)
        pair = self._find_pair(request)
        for model in request.models:
            is_split(model, 1, self.name)
            # Stage 3 shards models that are only evaluated too.
            if stage == 3 or (pair is not None and model is pair[0]):
                check_layout(model, self.name)
        if pair is not None and stage:
            check_sparse(pair[0], self.name)
        if pair is not None:
            # Only for its errors: the values are filled in again when the engine starts.
            complete(self.plugin, self._prepare_info(request, *pair))

    def _find_pair(self, request: PrepareRequest) -> tuple[torch.nn.Module, Any] | None:
        """The model to train, and its optimizer; None if all models are evaluated.

        Raises:
            ValueError: If there is more than one optimizer, or it does not match one model.
        """
        if not request.optimizers:
            return None
        if len(request.optimizers) > 1 or self._driver is not None:
            raise ValueError(
                f"{type(request.optimizers[-1]).__name__}: one Accelerator trains one model with one "
                "optimizer under DeepSpeed, whose backward pass is that of one engine. Make an Accelerator "
                "with the same plugin(s) for each pair."
            )
        (optimizer,) = request.optimizers
        if getattr(optimizer, "state", None):
            raise ValueError(
                f"{type(optimizer).__name__} has state already, which DeepSpeed would drop: it steps "
                "its own parameters. Prepare it before its first step; load_state restores what "
                "save_state wrote."
            )
        ids = {id(item) for group in optimizer.param_groups for item in group["params"]}
        owners = [model for model in request.models if ids & {id(item) for item in model.parameters()}]
        if len(owners) != 1:
            raise ValueError(
                f"{type(optimizer).__name__} has parameters of {len(owners)} of the models that are prepared "
                "with it: DeepSpeed creates one engine for one model and its optimizer. Prepare both in one "
                "call of prepare(), the model not before; several models can be submodules of one module."
            )
        in_model = {id(item) for item in owners[0].parameters()}
        standalone = [item for item in parameters_of([optimizer]) if id(item) not in in_model]
        if standalone:
            raise ValueError(
                f"{type(optimizer).__name__} has a tensor of shape {tuple(standalone[0].shape)} that "
                f"{type(owners[0]).__name__} does not have: {self.name} trains the parameters of one model. "
                "Make it a torch.nn.Parameter of the model (or of a module with both) before the "
                "optimizer is created."
            )
        return owners[0], optimizer

    def _prepare_info(self, request: PrepareRequest, model: torch.nn.Module, optimizer: Any) -> PrepareInfo:
        schedulers = [item for item in request.schedulers if _schedules(item, optimizer)]
        return PrepareInfo(
            model=model,
            optimizer=optimizer,
            scheduler=schedulers[0] if schedulers else None,
            batch_sizes=request.batch_sizes,
            previous_batch_size=request.previous_batch_size,
            num_steps=self.context.gradient_state.num_steps,
            num_processes=self.data_parallel.size // self._sequence_parallel_size,
            sequence_parallel_size=self._sequence_parallel_size,
            scheduler_steps_per_step=request.scheduler_steps_per_step,
            device_type=self.context.process.device.type,
            mixed_precision=self.context.precision.name,
        )

    def prepare(self, request: PrepareRequest) -> PrepareRequest:
        """Create an engine for the model and its optimizer; place other models, or shard them (stage 3)."""
        pair = self._find_pair(request)
        models, optimizers = [], []
        for model, put in zip(request.models, request.place_models, strict=True):
            if pair is not None and model is pair[0]:
                engine, wrapper = self._start_training(request, *pair)
                models.append(engine)
                optimizers.append(wrapper)
            else:
                models.append(self._prepare_evaluated(model, put, request))
        return replace(request, models=tuple(models), optimizers=tuple(optimizers))

    def _start_training(
        self, request: PrepareRequest, model: torch.nn.Module, optimizer: Any
    ) -> tuple[Any, Any]:
        info = self._prepare_info(request, model, optimizer)
        config = complete(self.plugin, info)
        options: dict[str, Any] = {"optimizer": optimizer}
        if isinstance(optimizer, DummyOptim):
            options = {"model_parameters": optimizer.params}
        if isinstance(info.scheduler, DummyScheduler) and info.scheduler.lr_scheduler_callable is not None:
            # DeepSpeed calls it with the optimizer that it has created.
            options["lr_scheduler"] = info.scheduler.lr_scheduler_callable
        trained = list(parameters_of([optimizer]))  # before DeepSpeed replaces them with its copies
        engine = self._start(model, config, **options)
        gradients.undo_trial_step(engine)
        gradients.reduce_matching(engine, self.context.process, self.name)
        gathered = gradients.gathered_modules(engine.module) if self.plugin.zero_stage == 3 else {}
        reject_create_graph([engine.module, *gathered.values()], self.name)
        if self._groups is not None:
            gradients.average_over_all_ranks(engine)
        self._driver = DeepSpeedEngineWrapper(engine, trained)
        wrapper = DeepSpeedOptimizerWrapper(
            engine.basic_optimizer, self._driver, gradient_state=self.context.gradient_state
        )
        if isinstance(info.scheduler, DummyScheduler):
            scheduler = DeepSpeedSchedulerWrapper(
                engine.lr_scheduler, wrapper, gradient_state=self.context.gradient_state
            )
            self._schedules.append((info.scheduler, scheduler))
        return engine, wrapper

    def _start(self, model: torch.nn.Module, config: dict[str, Any], **options: Any) -> Any:
        """Create a DeepSpeed engine for a model."""
        self.plugin.set_moe_leaf_modules(model)
        if not self.plugin.hf_ds_config.is_true("torch_autocast.enabled"):
            # Parameters are in lower precision, but operations such as norms still compute in fp32.
            wrap_forward(model, self.context.precision, self.context.process.device.type)
        with started(self.context.process) as deepspeed:
            if self._sequence_parallel_size > 1 and options:
                assert self.context.parallelism is not None, "it has the size"
                options["mpu"] = self._groups = ulysses.register(
                    model, self.context.parallelism, config["train_micro_batch_size_per_gpu"]
                )
            # It also returns a loader and a scheduler; the Accelerator prepares these itself.
            engine, *_ = deepspeed.initialize(model=model, config=config, **options)
        for buffer in model.buffers():  # DeepSpeed broadcasts only parameters
            dist.broadcast(buffer, 0)
        self._compile(engine)
        return engine

    def _compile(self, engine: Any) -> None:
        dynamo = self.context.dynamo
        if dynamo is None or dynamo.backend == "NO":
            return
        options = dynamo.to_kwargs()
        if dynamo.use_regional_compilation:
            compile_regions_deepspeed(engine.module, **options)
            return
        # In place, by DeepSpeed's method: torch.compile would return an object that is not the engine.
        engine.compile(backend=options.pop("backend"), compile_kwargs=options)

    def _prepare_evaluated(
        self, model: torch.nn.Module, put: bool, request: PrepareRequest
    ) -> torch.nn.Module:
        # Below stage 3 every process has all weights, which need not be gathered.
        if self.plugin.zero_stage != 3:
            return super()._prepare_model(model, put, evaluation_mode=True)
        engine: torch.nn.Module = self._start(
            model, complete(self.plugin, self._prepare_info(request, model, None))
        )
        return engine

    def release(self) -> None:
        """Remove the engine's hooks from the model, drop it, and reset filled-in settings to "auto"."""
        if self._driver is not None:
            # Otherwise hooks on the model's modules keep the engine and all optimizer states alive.
            self._driver.engine.destroy()
        self._driver, self._groups = None, None
        self._schedules.clear()
        self.plugin.forget_filled()

    def setup_scheduler(self, scheduler: Any) -> Any | None:
        """The scheduler that replaces a placeholder.

        Raises:
            ValueError: If its optimizer was prepared without it.
        """
        for placeholder, prepared in self._schedules:
            if scheduler is placeholder:
                return prepared
        if isinstance(scheduler, DummyScheduler):
            raise ValueError(
                "DummyScheduler stands for a scheduler that DeepSpeed creates with its engine. Pass it "
                "to the same call of prepare() as the model and the optimizer."
            )
        return None

    def wrap_loader(self, loader: Any) -> Any:
        """Under sequence parallelism, a loader whose batches the processes of a group share."""
        if self._groups is None or isinstance(loader, ulysses.SequenceParallelLoader):
            return loader
        return ulysses.SequenceParallelLoader(loader, self._groups, self.context.process.device)

    # In a step

    @property
    def _training(self) -> DeepSpeedEngineWrapper:
        if self._driver is None:
            raise ValueError(
                "DeepSpeed has nothing to train: pass the model and its optimizer to one call of prepare() "
                "first."
            )
        return self._driver

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the engine's backward pass; the window decides whether a step follows."""
        self._training.backward(loss, self.context.gradient_state.sync_gradients, **kwargs)

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose backward passes are not the window's last; stages 2 and 3 still reduce in each."""
        driver = self._driver
        return contextlib.nullcontext() if driver is None or model is not driver.engine else driver.no_sync()

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients accumulated in this window; sharded ones are multiplied in the step."""
        if gradients.in_parameters(self._training.engine):
            super().scale_gradients(parameters, factor)
        else:
            self._training.scale(factor)

    def clip_gradients(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        clip_value: float | None = None,
    ) -> torch.Tensor | None:
        """Make the next step clip by the norm; returns the norm before clipping.

        The smaller of this norm and `gradient_clipping` of the configuration is used. Without `max_norm` the
        norm is that so far, at stage 0, and None at other stages, where gradients are not complete yet.

        Raises:
            ValueError: If gradients are sharded, and are not clipped by the 2-norm of all of them.
        """
        driver = self._training
        is_in_parameters = gradients.in_parameters(driver.engine)
        if is_in_parameters and (clip_value is not None or max_norm is None):
            return super().clip_gradients(parameters, norm_type=norm_type, clip_value=clip_value)
        if clip_value is not None:
            raise ValueError(
                f"clip_grad_value_: {self.name} shards gradients, and clips them only by their norm. Use "
                "clip_grad_norm_, or zero_stage=0."
            )
        if max_norm is None:
            return None
        if is_in_parameters:
            scale = gradients.loss_scale(driver.engine)
            scaled = torch.nn.utils.clip_grad_norm_(parameters, max_norm * scale, norm_type=norm_type)
            norm_before: torch.Tensor = scaled / scale
            return norm_before
        if norm_type != 2 or max_norm <= 0:
            raise ValueError(
                f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}): {self.name} clips by "
                "the 2-norm, to a positive one."
            )
        gradients.check_all_parameters(driver.engine, parameters, self.name)
        norm = driver.norm()
        gradients.set_clipping(driver.engine, float(max_norm))
        return norm

    # Saving and loading

    @property
    def checkpoint(self) -> EngineCheckpoint:
        """DeepSpeed's own format, once it trains a model."""
        return EngineCheckpoint(native=None if self._driver is None else DeepSpeedCheckpoint(self._driver))

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state; at stage 3 only on the main process, the other ranks get an empty dict."""
        if checkpoint.is_sharded(model):
            return checkpoint.gather_full_state(model)
        return super().state_dict(model, unwrap)

    def to_load(self, item: Any) -> Any:
        """The model or optimizer, to load a full state into."""
        return checkpoint.ShardedModel(item) if checkpoint.is_sharded(item) else item


def _schedules(scheduler: Any, optimizer: Any) -> bool:
    """Whether a scheduler (or a placeholder, or a prepared one) schedules an optimizer."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    # torch's schedulers have it; a prepared optimizer is a wrapper, with the real one inside.
    scheduled = getattr(scheduler, "optimizer", None)
    return scheduled is optimizer or getattr(scheduled, "optimizer", scheduled) is optimizer
