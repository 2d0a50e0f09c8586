"""The Accelerator: a thin face over process state, an engine, loaders, gradients and checkpoints."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel.engines import plugin_class
from accel.engines.common.checks import mapped_devices
from accel.engines.start import start_engine
from accel.observe.base import start_observers
from accel.saving.methods import CheckpointControl
from accel.trackers import registry
from accel.trackers.session import TrackerControl
from accel.training import arguments
from accel.training.agreement import Agreement
from accel.training.arguments import UNSET
from accel.training.attributes import RunAttributes
from accel.training.collectives import CollectiveControl
from accel.training.coordinates import MeshCoordinates
from accel.training.gradients import GradientControl, drop_gradients, has_gradients
from accel.training.misuse import MisuseChecker
from accel.training.prepare import (
    check_kind,
    prepare,
    prepare_loader,
    prepare_models_and_optimizers,
    prepare_scheduler,
)
from accel.training.run import Run
from accel.training.uneven import join_uneven_inputs
from accel_data.config import DataLoaderConfiguration
from accel_ops.memory import release_memory
from accel_optim.precision import autocast
from accel_optim.window import Window
from accel_state.accelerator_state import AcceleratorState
from accel_state.gradient import GradientState
from accel_state.handlers import GradientAccumulationPlugin, ProfileKwargs
from accel_state.process.methods import ProcessMethods
from accel_state.train_plan import make_train_plan

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from accel.trackers.base import GeneralTracker
    from accel_ckpt.config import ProjectConfiguration
    from accel_optim.handlers import AutocastKwargs
    from accel_optim.scheduler import AcceleratedScheduler
    from accel_state.enums import DynamoBackend, LoggerType, PrecisionType, RNGType
    from accel_state.handlers import KwargsHandler, TorchDynamoPlugin
    from accel_state.parallelism.config import ParallelismConfig

__all__ = ["Accelerator", "DataLoaderConfiguration", "GradientAccumulationPlugin"]


class Accelerator(
    RunAttributes,
    GradientControl,
    CollectiveControl,
    CheckpointControl,
    MeshCoordinates,
    TrackerControl,
    ProcessMethods,
):
    """Runs an ordinary PyTorch training loop on any number of processes and in any precision.

    Args:
        device_placement: Put prepared objects and their batches on the device.
        split_batches: Split the loader's batches over the processes instead of giving each process whole
            ones; the same setting as `DataLoaderConfiguration.split_batches`.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; default: ACCELERATE_MIXED_PRECISION, then "no".
        gradient_accumulation_steps: Micro-batches per optimizer step;
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS, which the launcher's flag sets, comes before it.
        cpu: Stay on the CPU although there is an accelerator.
        dataloader_config: How loaders are sharded.
        deepspeed_plugin: Options of DeepSpeed, when it is the engine.
        fsdp_plugin: Options of FSDP, when it is the engine.
        torch_tp_plugin: Options of tensor parallelism.
        megatron_lm_plugin: Options of Megatron-LM, when it is the engine.
        rng_types: Generators synchronised at the start of each iteration; default: the sampler's alone.
        log_with: Trackers, by name or as objects; "all" for every one whose library is installed.
        project_dir: Where checkpoints and logs go.
        project_config: The same and more.
        gradient_accumulation_plugin: The accumulation settings in full, instead of the number alone.
        step_scheduler_with_optimizer: Step prepared schedulers only when their optimizer stepped.
        kwargs_handlers: Options for autocast, DDP, the scaler, the process group and the profiler; one of
            each.
        dynamo_backend: A torch.compile backend by name.
        dynamo_plugin: The compile options in full.
        deepspeed_plugins: Several named DeepSpeedPlugins.
        parallelism_config: Sizes of the device mesh's dimensions.
        **deprecated: Arguments of earlier releases (fp16, logging_dir, dispatch_batches, even_batches,
            use_seedable_sampler), each with a FutureWarning.

    Raises:
        ValueError: If a value is unknown, or two arguments contradict each other.
        ImportError: If what the engine or the precision needs is not installed.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = UNSET,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: str | LoggerType | GeneralTracker | list[str | LoggerType | GeneralTracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        **deprecated: Any,
    ) -> None:
        if deprecated:
            known = inspect.signature(Accelerator).parameters
            mixed_precision, dataloader_config, project_config = arguments.resolve_old_spellings(
                deprecated, mixed_precision, dataloader_config, project_config, known=[*known]
            )
        project_configuration = arguments.resolve_project(project_dir, project_config)
        dataloader_config = arguments.resolve_dataloader_config(dataloader_config, split_batches)
        self.handlers = arguments.sort_handlers(kwargs_handlers)
        plan = make_train_plan(  # raises before anything is started
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            torch_tp_plugin=torch_tp_plugin,
            parallelism_config=parallelism_config,
            mixed_precision=mixed_precision,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            device_placement=device_placement,
            external_settings=self.handlers.engine,
            plugin_class=plugin_class,
        )
        process_group_options = self.handlers.init.to_kwargs() if self.handlers.init is not None else {}
        # Joins the process group: from here on collectives are possible.
        state = AcceleratorState._of(plan, cpu, process_group_options)
        gradient_state = GradientState.new(plan.accumulation)  # two in one program have windows of their own
        # An engine may need the process group, and makes the scaler, so that it comes before the run.
        engine = start_engine(state.plan, state, gradient_state, **self.handlers.for_engines())
        self.run = Run(
            state=state,
            gradient_state=gradient_state,
            window=Window(gradient_state),
            scaler=engine.context.scaler,
            engine=engine,
            misuse=MisuseChecker(),
            project_configuration=project_configuration,
            dataloader_config=dataloader_config,
            rng_types=arguments.resolve_rng_types(rng_types),
            device_placement=plan.device_placement,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
        )
        arguments.warn_unread(self.handlers, self.engine)  # the engine says what it does not read
        self.log_with = registry.filter_trackers(log_with, self.logging_dir)
        self.trackers, self.finished_trackers = [], None
        self.failed_trackers = set()
        self.flag_tensor = None
        self._triggers = Agreement(self.process)
        start_observers(self.run, self.handlers.observers)

    # The engine

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeedPlugin, or None."""
        return self.state.deepspeed_plugin

    # Loaders

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader over the rest of the epoch, without reading the first `num_batches`."""
        from accel_data.skip import skip_first_batches

        return skip_first_batches(dataloader, num_batches=num_batches)

    # Preparing

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers; they come back in the order given.

        Preparing a prepared object returns it as it is. The order of the arguments does not matter.

        Args:
            *args: The objects.
            device_placement: Per object, whether it is put on the device.

        Raises:
            ValueError: If the engine cannot train an object; the message names it and the fix.
        """
        result = prepare(self.run, args, device_placement, caller=self)
        # As documented: one object comes back by itself, several as a tuple.
        return result[0] if len(result) == 1 else tuple(result)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model; with `evaluation_mode` nothing is set up for gradients."""
        check_kind(model, "model")
        (prepared,) = prepare_models_and_optimizers(
            self.run, [model], [device_placement], evaluation_mode, caller=self
        )
        return prepared  # type: ignore[no-any-return]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Prepare one optimizer."""
        check_kind(optimizer, "optimizer")
        (prepared,) = prepare_models_and_optimizers(self.run, [optimizer], [device_placement], caller=self)
        return prepared  # type: ignore[no-any-return]

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Prepare one learning rate scheduler."""
        check_kind(scheduler, "scheduler")
        return prepare_scheduler(self.run, scheduler)

    def prepare_data_loader(
        self,
        data_loader: torch.utils.data.DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one loader."""
        return prepare_loader(self.run, data_loader, device_placement, slice_fn_for_dispatch)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """The model without what `prepare` wrapped it in."""
        return self.engine.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Whether device maps spread the model over several devices; `prepare` rejects it on several
        processes.
        """
        return len(mapped_devices(model)) > 1

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release these objects and everything prepared, collect garbage, and count steps and loaders anew.

        The gradients of an accumulation window that is open are dropped. Loaders that are prepared afterwards
        have the orders that the first ones had with the same seed.
        """
        from accel_data.order.seeding import reset_seeding

        run = self.run
        reset_seeding(run.gradient_state)
        # Before the lists are emptied, through which the gradients are found.
        if has_gradients(run):
            drop_gradients(run)
        for held in (run.models, run.optimizers, run.schedulers, run.loaders):
            # In place: the engine and its loaders may hold the same lists.
            held.clear()
        run.engine.release()  # what engines hold themselves (DeepSpeed's and Megatron's models)
        run.lomo = None
        run.window.reset()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    # Contexts

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """A context in the Accelerator's precision; `autocast_handler` overrides its options."""
        options = autocast_handler if autocast_handler is not None else self.handlers.autocast
        return autocast(self.device.type, self.mixed_precision, options)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """A context for training on inputs whose number differs between processes.

        Args:
            joinables: PrepareRequest models (or torch's Joinable objects).
            even_batches: Overrides the setting for prepared map-style loaders inside the context.
        """
        return join_uneven_inputs(self.run, joinables, even_batches)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context for forward and backward of one step, in which each process has its part of sequences.

        Without `parallelism_config.cp_size` above 1 it does nothing.

        Args:
            buffers: Every tensor with one entry per token (inputs, labels, a model's table of positions);
                they change in place.
            buffer_seq_dims: The dimension of tokens of each.
            no_restore_buffers: Those that need not be whole again afterwards.

        Raises:
            ValueError: If sequences cannot be shared: among others if their length does not divide by
                2 * cp_size, or attention has a mask.
            RuntimeError: If no attention layer of the model ran inside, or backward runs after the context.
        """
        return self.engine.loaders.context_parallel(buffers, buffer_seq_dims, no_restore_buffers)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """Profile the code inside, with the options of `profile_handler` or else of `kwargs_handlers`."""
        from accel.observe.profiling.recording import profile

        return profile(self.process, profile_handler or self.handlers.profile or ProfileKwargs())

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: torch.nn.Module) -> Any:
        """The prepared loader `dl`, each batch shared by a sequence-parallel group (DeepSpeed's Ulysses).

        `prepare` does it for loaders that are prepared together with the model; this is for others, once the
        model is prepared.

        Raises:
            ValueError: If there is no sequence parallelism, or `model` is not prepared.
        """
        if not any(known is model for known in self.run.models):
            raise ValueError("deepspeed_ulysses_dl_adapter needs the prepared model: prepare() comes first.")
        if self.parallelism_config is None or not self.parallelism_config.sp_enabled:
            raise ValueError("There is no sequence parallelism: pass ParallelismConfig(sp_size=...).")
        return self.engine.loaders.wrap_loader(dl)

    # The end

    def end_training(self) -> None:
        """Wait for the save in the background, finish the trackers, leave the process group; call it last."""
        with contextlib.ExitStack() as ending:  # from the last to the first, whatever one of them raises
            ending.callback(self.state.destroy_process_group)
            for observer in self.run.observers:
                ending.callback(observer.stop)
            self.run.observers = []
            self.run.gradient_state.events = None
            # A run that never saves does not import the code of saving at its end.
            if "accel_ckpt.background.thread" in sys.modules:
                ending.callback(self.wait_for_save)
            if self.run.preemption is not None:
                ending.callback(self.run.preemption.stop)
            ending.callback(self.finish_trackers)
