"""The Accelerator: the user-facing class. Each method calls a function with explicit arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

import torch

from accel.engines import plugin_class
from accel.engines.start import start_engine
from accel.observe.base import start_observers
from accel.saving import hooks
from accel.state import AcceleratorState
from accel.trackers.session import TrackerSession
from accel.training import arguments, collectives, ending, gradients, prepare, uneven
from accel.training.any_rank_flag import AnyRankFlag
from accel.training.arguments import UNSET
from accel.training.mesh_ranks import mesh_rank
from accel.training.misuse import MisuseChecker
from accel.training.run import Run
from accel_data.config import DataLoaderConfiguration
from accel_optim.window import Window
from accel_state.gradient import GradientState
from accel_state.handlers import GradientAccumulationPlugin, ProfileKwargs
from accel_state.train_plan import make_train_plan
from accel_state.verify import output_path

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Never, TypeVarTuple, Unpack

    from accel.engines import Engine
    from accel.engines.common.placeholders import PlaceholderScheduler
    from accel.engines.deepspeed.plugin import DeepSpeedPlugin
    from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
    from accel.engines.megatron.plugin import MegatronLMPlugin
    from accel.engines.tp_plugin import TorchTensorParallelPlugin
    from accel.trackers.base import GeneralTracker
    from accel.training.types import Decorator, EngineSettings, HasStep, Tree
    from accel_ckpt.config import ProjectConfiguration
    from accel_optim.handlers import AutocastKwargs
    from accel_optim.scheduler import AcceleratedScheduler
    from accel_state.enums import DistributedType, DynamoBackend, LoggerType, PrecisionType, RNGType
    from accel_state.handlers import KwargsHandler, TorchDynamoPlugin
    from accel_state.literals import DynamoBackendName, LoggerName, PrecisionName, Reduction, RNGTypeName
    from accel_state.parallelism.config import ParallelismConfig
    from accel_state.process.info import ProcessInfo
    from accel_state.step_events import Observer
    from accel_state.train_plan import TrainPlan

    Objects = TypeVarTuple("Objects")
    TrackerArgument: TypeAlias = LoggerName | LoggerType | GeneralTracker

T = TypeVar("T")
Model = TypeVar("Model", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Loader = TypeVar("Loader", bound="DataLoader[Any]")
P = ParamSpec("P")
R = TypeVar("R")

__all__ = ["Accelerator", "DataLoaderConfiguration", "GradientAccumulationPlugin"]


class Accelerator:
    """Runs an ordinary PyTorch training loop on any number of processes and in any precision.

    Args:
        device_placement: Put prepared objects and their batches on the device.
        split_batches: Split the loader's batches over the processes instead of giving each process full
            ones; the same setting as `DataLoaderConfiguration.split_batches`.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; default: ACCELERATE_MIXED_PRECISION, then "no".
        gradient_accumulation_steps: Micro-batches per optimizer step.
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS, which the launcher's flag sets, overrides it.
        cpu: Use the CPU even where there is an accelerator.
        dataloader_config: How loaders are sharded.
        deepspeed_plugin: Options of DeepSpeed, when it is the engine.
        fsdp_plugin: Options of FSDP, when it is the engine.
        torch_tp_plugin: Options of tensor parallelism.
        megatron_lm_plugin: Options of Megatron-LM, when it is the engine.
        rng_types: Generators synchronized at the start of each iteration; default: the sampler's only.
        log_with: Trackers, by name or as objects; "all" for every one whose library is installed.
        project_dir: Where checkpoints and logs go.
        project_config: `project_dir` plus naming and retention of checkpoints.
        gradient_accumulation_plugin: The accumulation settings in full, instead of the number.
        step_scheduler_with_optimizer: Step prepared schedulers only when their optimizer stepped.
        kwargs_handlers: Options for autocast, DDP, the scaler, the process group and the profiler, observers,
            and the settings of an engine of another package; one of each.
        dynamo_backend: A torch.compile backend by name.
        dynamo_plugin: The compile options in full.
        deepspeed_plugins: Several DeepSpeedPlugins by name.
        parallelism_config: Sizes of the device mesh's dimensions.
        fp16: Deprecated: `mixed_precision="fp16"`.
        logging_dir: Deprecated: `ProjectConfiguration(logging_dir=...)`.
        dispatch_batches: Deprecated: `DataLoaderConfiguration(dispatch_batches=...)`.
        even_batches: Deprecated: `DataLoaderConfiguration(even_batches=...)`.
        use_seedable_sampler: Deprecated: `DataLoaderConfiguration(use_seedable_sampler=...)`.

    Raises:
        TypeError: If an argument is unknown, or a plugin of the wrong class.
        ValueError: If a value is unknown, or two arguments contradict each other.
        ImportError: If a package that the engine or the precision needs is not installed.

    Example:
        accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_function(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = UNSET,
        mixed_precision: PrecisionType | PrecisionName | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: Sequence[RNGTypeName | RNGType] | None = None,
        log_with: TrackerArgument | Sequence[TrackerArgument] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler | Observer | EngineSettings] | None = None,
        dynamo_backend: DynamoBackend | DynamoBackendName | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        fp16: bool = UNSET,
        logging_dir: str | os.PathLike[str] = UNSET,
        dispatch_batches: bool | None = UNSET,
        even_batches: bool = UNSET,
        use_seedable_sampler: bool = UNSET,
        **unknown: Never,
    ) -> None:
        arguments.reject_unknown(Accelerator, unknown)
        deprecated = {"fp16": fp16, "logging_dir": logging_dir, "dispatch_batches": dispatch_batches}
        deprecated |= {"even_batches": even_batches, "use_seedable_sampler": use_seedable_sampler}
        mixed_precision, dataloader_config, project_config = arguments.resolve_deprecated(
            deprecated, mixed_precision, dataloader_config, project_config
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
            **self.handlers.for_plan(),
            plugin_class=plugin_class,
        )
        # Joins the process group: from here on collectives are possible.
        state = AcceleratorState._from_plan(plan, cpu, self.handlers.process_group_options())
        gradient_state = GradientState.new(plan.accumulation)  # two in one program have separate windows
        # An engine may need the process group, and makes the scaler.
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
        arguments.warn_unread(self.handlers, engine)  # the engine says what it does not read
        self.tracking = TrackerSession(state.process, project_configuration, log_with)
        self.flag_tensor: torch.Tensor | None = None
        self._trigger = AnyRankFlag(state.process)
        start_observers(self.run, self.handlers.observers)
        self.run.observers.append(self.tracking)

    # What it trains with

    @property
    def plan(self) -> TrainPlan:
        """The engine, precision, mesh and accumulation, and the arguments and variables that decided them."""
        return self.run.state.plan

    @property
    def state(self) -> AcceleratorState:
        """The plan and this process, as `AcceleratorState` shows them."""
        return self.run.state

    @state.setter
    def state(self, state: AcceleratorState) -> None:
        self.run.state = state

    @property
    def gradient_state(self) -> GradientState:
        """The state of the accumulation window, which optimizers, schedulers and loaders read.

        Another one that is set here is followed by all of them. Inside a loop over a loader that is a
        ValueError, as the new state would not see the loader's end.
        """
        return self.run.gradient_state

    @gradient_state.setter
    def gradient_state(self, gradient_state: GradientState) -> None:
        gradients.set_gradient_state(self.run, gradient_state)

    @property
    def window(self) -> Window:
        """The accumulation window."""
        return self.run.window

    @window.setter
    def window(self, window: Window) -> None:
        self.run.window = window

    @property
    def engine(self) -> Engine:
        """How training is parallelized."""
        return self.run.engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self.run.engine = engine

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16 training, else None.

        Another one that is set here, between two windows, scales the losses and steps prepared optimizers.
        If parameters are sharded, it must be one of `accel.utils.get_fsdp2_grad_scaler`, with which all
        processes skip the same steps; any other is a ValueError. So is every scaler under DeepSpeed and
        Megatron-LM, which scale losses themselves.
        """
        return self.run.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        gradients.set_scaler(self.run, scaler)

    @property
    def distributed_type(self) -> DistributedType:
        """How training is distributed; it names the engine."""
        return self.state.distributed_type

    @property
    def mixed_precision(self) -> str:
        """The compute precision: "no", "fp16", "bf16" or "fp8"."""
        return self.state.mixed_precision

    @property
    def multi_device(self) -> bool:
        """Whether several accelerator devices train together (MULTI_GPU and similar)."""
        return self.process.world_size > 1 and self.process.device.type != "cpu"

    @property
    def fp8_backend(self) -> str | None:
        """The library that computes in fp8: "AO", "TE" or "MSAMP"; None in other precisions."""
        fp8 = self.engine.context.fp8
        return None if fp8 is None else fp8.backend

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The active DeepSpeedPlugin, or None."""
        return self.state.deepspeed_plugin  # type: ignore[no-any-return]

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP version 2 is the engine."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether the engine works on mesh dimensions that compose."""
        return self.state.is_fsdp2

    @property
    def _models(self) -> list[torch.nn.Module]:
        # Client programs read these five, transformers' Trainer among them.
        return self.run.prepared.models

    @_models.setter
    def _models(self, models: list[torch.nn.Module]) -> None:
        self.run.prepared.models = models

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return self.run.prepared.optimizers

    @_optimizers.setter
    def _optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.run.prepared.optimizers = optimizers

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self.run.prepared.schedulers

    @_schedulers.setter
    def _schedulers(self, schedulers: list[AcceleratedScheduler]) -> None:
        self.run.prepared.schedulers = schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self.run.prepared.loaders

    @_dataloaders.setter
    def _dataloaders(self, dataloaders: list[Any]) -> None:
        self.run.prepared.loaders = dataloaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self.run.registered

    @_custom_objects.setter
    def _custom_objects(self, custom_objects: list[Any]) -> None:
        self.run.registered = custom_objects

    # Settings

    @property
    def device_placement(self) -> bool:
        """Whether prepared objects and batches go to the device."""
        return self.run.device_placement

    @device_placement.setter
    def device_placement(self, device_placement: bool) -> None:
        self.run.device_placement = device_placement

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers step only when their optimizer did."""
        return self.run.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, step_scheduler_with_optimizer: bool) -> None:
        self.run.step_scheduler_with_optimizer = step_scheduler_with_optimizer

    @property
    def rng_types(self) -> list[RNGType]:
        """Generators synchronized at the start of each iteration."""
        return self.run.rng_types

    @rng_types.setter
    def rng_types(self, rng_types: Sequence[RNGTypeName | RNGType] | None) -> None:
        self.run.rng_types = arguments.resolve_rng_types(rng_types)

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are sharded."""
        return self.run.dataloader_config

    @dataloader_config.setter
    def dataloader_config(self, dataloader_config: DataLoaderConfiguration) -> None:
        self.run.dataloader_config = dataloader_config

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batches are split over the processes."""
        return self.run.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all; None: for iterable datasets only."""
        return self.run.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether every process gets the same number of full batches."""
        return self.run.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.run.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether random samplers are replaced by SeedableRandomSampler."""
        return self.run.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self.run.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders are torchdata's StatefulDataLoader."""
        return self.run.dataloader_config.use_stateful_dataloader

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where checkpoints and logs go, and which checkpoints are kept."""
        return self.run.project_configuration

    @project_configuration.setter
    def project_configuration(self, project_configuration: ProjectConfiguration) -> None:
        self.run.project_configuration = project_configuration

    @property
    def project_dir(self) -> str | None:
        """The project's folder."""
        return output_path(self.run.project_configuration.project_dir)

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        return output_path(self.run.project_configuration.logging_dir)

    @property
    def save_iteration(self) -> int:
        """The number that the next automatically named checkpoint gets, or a higher one: above all there."""
        return self.run.project_configuration.iteration

    # Preparing

    @overload
    def prepare(self, one: T, /, *, device_placement: Sequence[bool | None] | None = None) -> T: ...
    @overload
    def prepare(
        self, *args: Unpack[Objects], device_placement: Sequence[bool | None] | None = None
    ) -> tuple[Unpack[Objects]]: ...
    def prepare(  # type: ignore[misc]  # mypy: "does not accept all possible parameters", which it does
        self, *args: Any, device_placement: Sequence[bool | None] | None = None
    ) -> Any:
        """Prepare models, optimizers, loaders and schedulers for the engine, precision and processes.

        Preparing a prepared object returns it as it is. The order of the arguments does not matter. Objects
        of other kinds come back as they are, with a warning.

        Args:
            *args: The objects.
            device_placement: Per object, whether it is put on the device; None for the Accelerator's default.

        Returns:
            One object by itself; several as a tuple in the order of the arguments.

        Raises:
            ValueError: If the engine cannot train an object; the message names it and the fix.
            TypeError: If an optimizer is of a user's subclass of AcceleratedOptimizer.

        Example:
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
            assert accelerator.prepare(model) is model
        """
        prepared = prepare.prepare(self.run, args, device_placement, accelerator=self)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: Model, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Model:
        """Prepare one model.

        Args:
            model: The model.
            device_placement: Whether it is put on the device; None for the Accelerator's default.
            evaluation_mode: Prepare it for evaluation only: nothing is set up for gradients.

        Returns:
            The model to train with.

        Raises:
            TypeError: If it is not a module.
            ValueError: If the engine cannot train it.

        Example:
            teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
        """
        return prepare.prepare_model(self.run, model, device_placement, evaluation_mode, accelerator=self)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Prepare one optimizer.

        Args:
            optimizer: The optimizer.
            device_placement: Whether its state is put on the device; None for the Accelerator's default.

        Returns:
            An AcceleratedOptimizer, which steps at the end of accumulation windows.

        Raises:
            TypeError: If it has not the methods of an optimizer.
            ValueError: If the engine cannot step it.

        Example:
            optimizer = accelerator.prepare_optimizer(optimizer)
        """
        return prepare.prepare_optimizer(self.run, optimizer, device_placement, accelerator=self)

    def prepare_scheduler(self, scheduler: HasStep | PlaceholderScheduler) -> AcceleratedScheduler:
        """Prepare one learning rate scheduler.

        Args:
            scheduler: A scheduler of torch, any object with a `step` method, or a DummyScheduler.

        Returns:
            An AcceleratedScheduler, which steps when its optimizer did.

        Raises:
            TypeError: If it has no `step` method.

        Example:
            scheduler = accelerator.prepare_scheduler(scheduler)
        """
        return prepare.prepare_scheduler(self.run, scheduler)

    def prepare_data_loader(
        self,
        data_loader: Loader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Loader:
        """Prepare one loader.

        Args:
            data_loader: The loader.
            device_placement: Whether batches are put on the device; None for the Accelerator's default.
            slice_fn_for_dispatch: Called as `slice_fn(batch, slice, process_index=, num_processes=)` to take
                one process's rows of a batch that the main process read for all.

        Returns:
            A loader over this process's batches.

        Raises:
            ValueError: If the loader cannot be sharded; the message says why.

        Example:
            loader = accelerator.prepare_data_loader(loader)
        """
        return prepare.prepare_loader(self.run, data_loader, device_placement, slice_fn_for_dispatch)  # type: ignore[no-any-return]

    def skip_first_batches(self, dataloader: Loader, num_batches: int = 0) -> Loader:
        """Return a loader over the rest of the epoch, without reading the first batches.

        Args:
            dataloader: A loader, prepared or not.
            num_batches: How many batches to skip.

        Returns:
            A loader whose first iteration begins after them.

        Raises:
            ValueError: If `num_batches` is negative.
            TypeError: If it is no integer, or the loader's batches cannot be skipped.

        Example:
            rest_of_epoch = accelerator.skip_first_batches(loader, num_batches=1)
            assert len(list(rest_of_epoch)) == len(loader) - 1
        """
        from accel_data.skip import skip_first_batches

        rest: Any = skip_first_batches(dataloader, num_batches=num_batches)
        return rest  # type: ignore[no-any-return]

    def unwrap_model(
        self, model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Model:
        """Return the model without what `prepare` wrapped it in.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: Keep the conversion of outputs to fp32.
            keep_torch_compile: Keep what torch.compile made of it.

        Returns:
            The model, whose parameters are those that are trained.

        Example:
            accelerator.unwrap_model(model).state_dict()
        """
        return self.engine.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)  # type: ignore[return-value]

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a device map spreads the model over several devices.

        `prepare` rejects such a model where there are several processes.

        Args:
            model: The model.

        Returns:
            True if its `hf_device_map` names two devices or more.

        Example:
            assert not accelerator.verify_device_map(model)
        """
        return prepare.is_spread(model)

    def deepspeed_ulysses_dl_adapter(self, dl: Loader, model: torch.nn.Module) -> Loader:
        """Split each batch of a prepared loader over a sequence-parallel group (DeepSpeed's Ulysses).

        `prepare` does it for loaders that are prepared together with the model; this is for others.

        Args:
            dl: The prepared loader.
            model: The prepared model.

        Returns:
            The loader over this process's shards of sequences.

        Raises:
            ValueError: If there is no sequence parallelism, or `model` is not prepared.
        """
        return prepare.split_sequences(self.run, dl, model)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release these objects and everything prepared, collect garbage, and restart the count of steps.

        The gradients of an open accumulation window are dropped. Loaders that are prepared afterwards have
        the orders that the first ones had with the same seed.

        Args:
            *objects: What the caller's names refer to.

        Returns:
            None for each object, to be assigned to its name.

        Example:
            model, optimizer = accelerator.free_memory(model, optimizer)
            assert model is None and optimizer is None
        """
        return ending.free_memory(self.run, objects)

    def clear(self, *objects: Any) -> list[Any]:
        """Do the same as `free_memory`.

        Args:
            *objects: What the caller's names refer to.

        Returns:
            None for each object, to be assigned to its name.

        Example:
            model, optimizer = accelerator.clear(model, optimizer)
            assert model is None and optimizer is None
        """
        return ending.free_memory(self.run, objects)

    # The accumulation window and gradients

    @property
    def step(self) -> int:
        """Micro-batches in the open accumulation window; 0 at a boundary."""
        return self.run.window.step

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends an accumulation window. Loops that count themselves may set it."""
        return self.run.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.run.gradient_state._set_sync_gradients(sync_gradients)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.run.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        gradients.set_accumulation_steps(self.run, gradient_accumulation_steps)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was skipped, because fp16 gradients overflowed.

        Of two optimizers that step in turn, one may not have stepped in this micro-batch yet: ask each for
        its `step_was_skipped`.
        """
        return any(getattr(item, "step_was_skipped", False) for item in self.run.prepared.optimizers)

    def accumulate(self, *models: torch.nn.Module, loader: Any = None) -> AbstractContextManager[Any]:
        """Run one micro-batch of an accumulation window: gradients are reduced in its last one only.

        A window has `gradient_accumulation_steps` micro-batches, fewer at the end of the loader. Inside it
        `optimizer.step()`, `optimizer.zero_grad()` and `scheduler.step()` do nothing before its last one.

        Args:
            *models: The models that the micro-batch trains.
            loader: The prepared loader whose last batch ends the window (or an object that reads one and has
                `end_of_dataloader`), where several give batches to one micro-batch. By default the loader
                that gave the batch.

        Returns:
            A context manager, to be entered once per micro-batch.

        Raises:
            TypeError: If `loader` is not a prepared loader.
            ValueError: If it is not being iterated.

        Example:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = loss_function(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        """
        return gradients.accumulate(self.run, models, loader)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward does not reduce the gradients of a model.

        The first backward outside of it reduces them, in the same accumulation window.

        Args:
            model: A prepared model.

        Example:
            with accelerator.no_sync(model):
                accelerator.backward(loss_function(model(inputs), targets))
            accelerator.backward(loss_function(model(inputs), targets))
        """
        return self.engine.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward reduces gradients although the forward ran under `no_sync`.

        Args:
            model: A model that DDP wraps; for others it does nothing.

        Example:
            with accelerator.no_sync(model):
                loss = loss_function(model(inputs), targets)
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(loss)
        """
        from accel.engines.ddp import sync_in_backward

        return sync_in_backward(model)

    def backward(
        self, loss: torch.Tensor, *, weight: float | torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        """Run the backward pass of a loss, scaled for its accumulation window (and for fp16).

        Without a weight the loss is a mean, and is divided by the number of accumulation steps: the window's
        gradient is the mean over its micro-batches, if they are of equal size and as many as that.

        With one, the loss is a **sum** over `weight` items (tokens, say), and the window's gradient is that
        of all its losses over all its weights, on all processes: the gradient of one batch with all the
        items, however ragged the counts, however many micro-batches the window has, and however they are
        split over processes. The processes add up their weights once per window, at its end (and once more
        in the first window), so all of them must call it there. `weight=1` with mean losses makes a window
        that the loader's end cut short count by its real size.

        Args:
            loss: The loss, a tensor of one element.
            weight: How many items the loss is the sum over, at least 0: a number, or a tensor of one element.
                A tensor on the accelerator is used without waiting for its value. It is the weight of the
                micro-batch: several losses of one give the same weight, and each is divided by the total.
            **kwargs: Passed to the engine's backward (`retain_graph`, for example).

        Raises:
            TypeError: If the weight is not a number.
            ValueError: If it is negative or not finite, if the micro-batch has another weight already, or if
                the window has losses of the other kind.
            RuntimeError: If a weight is passed inside `join_uneven_inputs`, where processes may be out of
                data.

        Example:
            outputs = model(inputs)
            loss = torch.nn.functional.mse_loss(outputs, targets, reduction="sum")
            accelerator.backward(loss, weight=targets.numel())
        """
        gradients.backward(self.run, loss, weight, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run backward, and with it the step, of a prepared optimizer that steps in backward (LOMO).

        `backward` does the same by itself when such an optimizer is prepared, with the learning rate that is
        passed to it (`learning_rate=`) or that of the optimizer's parameter group, which schedulers change.

        Args:
            loss: The loss of the micro-batch, a tensor of one element.
            learning_rate: The learning rate of this step.

        Raises:
            ValueError: If no such optimizer is prepared, or gradients would have to be accumulated.

        Example:
            optimizer = accelerator.prepare(lomo_optim.Lomo(model, lr=0.1))
            accelerator.lomo_backward(loss_function(model(inputs), targets), learning_rate=0.1)
        """
        gradients.lomo_backward(self.run, loss, learning_rate)

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Divide fp16 gradients by the loss scale, once per step; nothing to do in other precisions.

        Args:
            optimizer: One or several of the prepared optimizers; default: all.

        Raises:
            ValueError: If one is not prepared.

        Example:
            accelerator.unscale_gradients()
            largest = max(float(each.grad.abs().max()) for each in model.parameters())
        """
        gradients.unscale_gradients(self.run, optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip the gradients of `parameters` by their total norm.

        Before the last micro-batch of an accumulation window gradients are not complete yet: the norm so far
        is returned and nothing is clipped. In fp16 the gradients are unscaled first, unless that was done
        since the last step. An optimizer that steps in backward (LOMO) leaves nothing to clip: a warning.

        Args:
            parameters: Parameters of prepared models.
            max_norm: The largest norm that gradients may have.
            norm_type: The p of the p-norm; may be `float("inf")`.

        Returns:
            The total norm before clipping, a tensor without dimensions; None where an engine clips by itself.

        Raises:
            ValueError: If fp16 gradients belong to no prepared optimizer.

        Example:
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
        """
        return gradients.clip_grad_norm(self.run, parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value]; nothing before a window's last micro-batch.

        Args:
            parameters: Parameters of prepared models.
            clip_value: The largest absolute value.

        Raises:
            ValueError: If fp16 gradients belong to no prepared optimizer.

        Example:
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), clip_value=0.5)
                assert all(each.grad.abs().max() <= 0.5 for each in model.parameters())
        """
        gradients.clip_grad_value(self.run, parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context that computes in the Accelerator's precision.

        The forward passes of prepared models do so by themselves; this is for code outside of them.

        Args:
            autocast_handler: Options that override those of the Accelerator.

        Example:
            with accelerator.autocast():
                similarity = outputs @ outputs.T
        """
        return gradients.autocast(self.run, autocast_handler or self.handlers.autocast)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context for training on inputs whose number differs between processes.

        A process that has run out of data still participates in the gradient reductions of the others. Under
        engines other than DDP it has no effect, and a warning says so.

        Args:
            joinables: Prepared models (or torch's Joinable objects).
            even_batches: Overrides the setting for prepared map-style loaders inside the context.

        Example:
            with accelerator.join_uneven_inputs([model], even_batches=False):
                for inputs, targets in loader:
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
        """
        return uneven.join_uneven_inputs(self.run, joinables, even_batches)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context for forward and backward in which each process has its shard of the sequences.

        Without `parallelism_config.cp_size` above 1 it does nothing.

        Args:
            buffers: Every tensor with one entry per token (inputs, labels, a model's table of positions);
                they change in place.
            buffer_seq_dims: The dimension of tokens of each.
            no_restore_buffers: Those that need not be complete again afterwards.

        Raises:
            ValueError: If sequences cannot be split: among others if their length does not divide by
                2 * cp_size, or attention has a mask.
            RuntimeError: If no attention layer of the model ran inside, or backward runs after the context.

        Example:
            with accelerator.maybe_context_parallel([inputs, targets], [1, 1], {inputs, targets}):
                accelerator.backward(loss_function(model(inputs), targets))
        """
        return self.engine.data_parallel.shard_sequences(buffers, buffer_seq_dims, no_restore_buffers)

    # Collectives: every process calls them

    def gather(self, tensor: T) -> T:
        """Concatenate the tensors of all processes along their first dimension.

        Args:
            tensor: A tensor (rows, *), or nested lists, tuples and dicts of tensors. A tensor without
                dimensions counts as one row.

        Returns:
            The same structure; rows are in the order of ranks, on every process. Duplicates that padded the
            last batch are among them: see `gather_for_metrics`.

        Raises:
            TypeError: If a leaf is not a tensor.

        Example:
            all_losses = accelerator.gather(loss.detach())
            assert len(all_losses) == accelerator.num_processes
        """
        return collectives.gather(self.run, tensor)

    @overload
    def gather_for_metrics(
        self, input_data: object, use_gather_object: Literal[True], *, loader: Any = None
    ) -> list[Any]: ...
    @overload
    def gather_for_metrics(
        self, input_data: list[T], use_gather_object: bool = False, *, loader: Any = None
    ) -> list[T]: ...
    @overload
    def gather_for_metrics(
        self, input_data: Tree, use_gather_object: Literal[False] = False, *, loader: Any = None
    ) -> Tree: ...
    @overload
    def gather_for_metrics(
        self, input_data: object, use_gather_object: bool = False, *, loader: Any = None
    ) -> Any: ...
    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False, *, loader: Any = None
    ) -> Any:
        """Gather, and drop the rows that only padded the last batch: every sample counts once.

        After the loop it drops the padding of what has one row per sample of the full epoch, of the loader
        that ended last.

        Args:
            input_data: Nested tensors (rows, *), or any objects that can be pickled.
            use_gather_object: Gather by pickling although all leaves are tensors.
            loader: The prepared loader that the data was made from, where several give batches side by side.
                By default the one that gave the last batch, unless the number of rows is that of another.

        Returns:
            The same structure, with the rows of all processes in the order of ranks; for objects the flat
            list of those of all processes.

        Raises:
            TypeError: If `loader` is not a prepared loader.
            ValueError: If it was not iterated, or the data differs between processes that split sequences.
            RuntimeError: If some processes have no batch in this step.

        Example:
            correct = seen = 0
            for inputs, targets in loader:
                outputs, targets = accelerator.gather_for_metrics((model(inputs), targets))
                correct += int((outputs.round() == targets).sum())
                seen += len(targets)
            assert seen == len(loader.dataset)
        """
        return collectives.gather_for_metrics(self.run, input_data, use_gather_object, loader)

    def reduce(self, tensor: T, reduction: Reduction = "sum", scale: float = 1.0) -> T:
        """Reduce the tensors of all processes; every process gets the result.

        Args:
            tensor: A tensor, or nested lists, tuples and dicts of tensors, of the same shapes everywhere.
            reduction: "sum", "mean", "max" or "none" (each process keeps its tensor).
            scale: The result is multiplied by it.

        Returns:
            The same structure and shapes, in new memory and without gradient.

        Raises:
            ValueError: If the reduction is unknown.
            TypeError: If a leaf is no dense tensor, is boolean under "sum" or "mean", or complex under "max".

        Example:
            mean_loss = accelerator.reduce(loss.detach(), reduction="mean")
            count = accelerator.reduce(torch.ones(1, device=accelerator.device), reduction="sum")
            assert count.item() == accelerator.num_processes
        """
        return collectives.reduce(self.run, tensor, reduction, scale)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pad tensors to the largest size over the processes, so that they can be gathered.

        Args:
            tensor: A tensor, or nested lists, tuples and dicts of tensors, whose sizes along `dim` may
                differ between processes.
            dim: The dimension to pad; tensors without it come back as they are.
            pad_index: The value to pad with.
            pad_first: Pad at the beginning.

        Returns:
            The same structure; along `dim` a tensor has the largest size over the processes: (3, 5) and
            (3, 8) both become (3, 8) with `dim=1`.

        Raises:
            TypeError: If a leaf is no dense tensor.

        Example:
            padded = accelerator.pad_across_processes(tokens, dim=1, pad_index=0)
            all_tokens = accelerator.gather(padded)
            assert len(all_tokens) == accelerator.num_processes * len(tokens)
        """
        return collectives.pad_across_processes(self.run, tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise this process's flag, which the next `check_trigger` sees on every process.

        Example:
            if loss.isnan():
                accelerator.set_trigger()
            if accelerator.check_trigger():
                print("a process has a loss that is not a number")
        """
        self.flag_tensor = torch.ones((), device=self.device)

    def check_trigger(self) -> bool:
        """Return whether any process raised its flag since the last check. Lowers the flags.

        Returns:
            The same answer on every process.

        Example:
            accelerator.set_trigger()
            assert accelerator.check_trigger() and not accelerator.check_trigger()
        """
        raised, self.flag_tensor = self.flag_tensor is not None, None
        return self._trigger.check("check_trigger", raised)

    def verify_sync(self, *models: torch.nn.Module, buffers: bool = True, rng: bool = True) -> list[str]:
        """Check that models and random generators are the same on all processes, to the last bit.

        Args:
            *models: The models; by default all that are prepared.
            buffers: Whether to compare buffers too (running statistics of batch norm may differ).
            rng: Whether to compare random generators (they differ after `set_seed(device_specific=True)`).

        Returns:
            The names of what was not compared: tensors of which each process has a shard, and sparse or
            quantized ones.

        Raises:
            DistributedOperationException: On every process, if something differs: which parameter, buffer or
                generator is the first, on which processes, and how far they are apart.
            TypeError: If one is no module.

        Example:
            assert accelerator.verify_sync() == []
        """
        from accel.observe import sync

        return sync.verify_sync(self.run, models, buffers=buffers, rng=rng)

    # Checkpoints

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file, once per job (or once per machine, with save_on_each_node).

        Args:
            obj: Anything that torch.save takes; with `safe_serialization`, tensors by name.
            f: The file.
            safe_serialization: Write a safetensors file.

        Example:
            accelerator.save({"epoch": 3}, "progress.pt")
            accelerator.wait_for_everyone()
            assert torch.load("progress.pt") == {"epoch": 3}
        """
        from accel.saving import save

        save.save_object(self.run, obj, f, safe_serialization)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        main_process_only: bool | None = None,
        blocking: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write everything that `load_state` needs to continue from here. Every process calls it.

        Args:
            output_dir: The folder; None where checkpoints are named automatically.
            safe_serialization: Write weights as safetensors.
            main_process_only: Whether the main process calls it alone: the checkpoint then lacks the random
                generators of the other processes. By default that is taken from the code around the call
                (`if accelerator.is_main_process:`).
            blocking: False to copy the state, and to write and commit it in the background while training
                continues. One such save is in flight at most: the next call waits for it, and raises what
                went wrong in it, as do `wait_for_save`, `load_state` and `end_training`.
            **save_model_func_kwargs: Options of the engine (under DeepSpeed, of its `save_checkpoint`); other
                engines have none, and warn.

        Returns:
            The folder.

        Raises:
            ValueError: If there is no folder to write to.
            TypeError: If something that is saved has no safe form, or an option is misspelt: the message says
                which.

        Example:
            folder = accelerator.save_state("checkpoints/epoch_0", blocking=False)
            accelerator.wait_for_save()
            assert accelerator.load_state(folder)
        """
        from accel.saving import save

        return save.save_state(
            self.run, output_dir, safe_serialization, main_process_only, blocking, **save_model_func_kwargs
        )

    def wait_for_save(self) -> None:
        """Wait until the save in the background, if there is one, is committed.

        Raises:
            Exception: What went wrong in it.

        Example:
            accelerator.save_state("checkpoints/epoch_0", blocking=False)
            accelerator.wait_for_save()
        """
        from accel_ckpt.background import thread

        thread.wait()

    def save_on_preemption(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        exit_code: int = 75,  # EX_TEMPFAIL of sysexits.h
    ) -> None:
        """Save and exit if any process got a signal to end. Every process calls it, at the end of each step.

        The first call takes the signals. A signal to any process makes all of them save, commit and exit in
        the same step: at one of the next two calls at which no accumulation window is open. `load_state` then
        goes on exactly there.

        Args:
            output_dir: The folder of the checkpoint; None where checkpoints are named automatically.
            signals: Names of the signals.
            exit_code: How the processes end. The default, EX_TEMPFAIL, asks to be started again.

        Raises:
            SystemExit: With `exit_code`, when the checkpoint is committed.
            ValueError: If there is no folder to save to, or the system has none of the signals.
            RuntimeError: If this is not the main thread.

        Example:
            for inputs, targets in loader:
                accelerator.backward(loss_function(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                accelerator.save_on_preemption("checkpoints/preempted")
        """
        from accel.saving import preemption

        preemption.save_on_preemption(self, output_dir, signals, exit_code)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        strict: bool | None = None,
        verify: bool = True,
        map_location: str | torch.device | None = None,
        missing_ok: bool = False,
        **load_model_func_kwargs: Any,
    ) -> bool:
        """Restore what `save_state` wrote. Every process calls it.

        A script that is started again resumes with `load_state(missing_ok=True)`, which does nothing where
        there is no checkpoint yet; a checkpoint that is damaged, or differs from the objects, is an error all
        the same, and leaves everything as it was.

        Args:
            input_dir: The folder; None for the newest automatically named one.
            load_kwargs: Options of `torch.load` for everything but weights.
            strict: True to raise on any difference between the folder and the objects, False to restore what
                matches and warn of the rest; None for strict with folders that accel wrote.
            verify: Whether to compare the files with their digests.
            map_location: The device that files are read to: "cpu", "on_device" or a device.
            missing_ok: Whether to return False where there is no checkpoint, instead of raising.
            **load_model_func_kwargs: Options of the models' `load_state_dict` (under DeepSpeed, of its
                `load_checkpoint`).

        Returns:
            Whether a checkpoint was restored: True, but with `missing_ok` where there is none.

        Raises:
            ValueError: If there is no folder to read from.
            FileNotFoundError: If there is no checkpoint in it, and `missing_ok` is not set.
            CheckpointError: If it is damaged, or differs from the objects.
            TypeError: If an option is misspelt.

        Example:
            accelerator.save_state("checkpoints/epoch_0")
            assert accelerator.load_state("checkpoints/epoch_0")
            assert not accelerator.load_state("checkpoints/epoch_1", missing_ok=True)
        """
        from accel.saving import load

        settings = (strict, verify, map_location, missing_ok)
        return load.load_state(self.run, input_dir, load_kwargs, *settings, **load_model_func_kwargs)

    @property
    def should_save_model(self) -> bool:
        """Whether this process holds weights that have to be written."""
        return self.process.is_main or self.engine.traits.saves_on_all_processes

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state of a prepared model. Every process calls it.

        Args:
            model: The prepared model.
            unwrap: Use the names of the model that was passed to `prepare`.

        Returns:
            Tensors by name; empty on processes that an engine gathers nothing on.

        Example:
            state = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                torch.save(state, "weights.pt")
                assert torch.load("weights.pt").keys() == state.keys()
        """
        return self.engine.state_dict(model, unwrap)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        main_process_only: bool | None = None,
    ) -> None:
        """Write a model's weights into a folder, as `load_checkpoint_in_model` reads them.

        Every process calls it, or the main process alone: `main_process_only` is as for `save_state`.

        Args:
            model: The prepared model.
            save_directory: The folder.
            max_shard_size: The largest file, in bytes or as "10GB"; more than one gets an index.
            safe_serialization: Write safetensors files.
            main_process_only: Whether the main process calls it alone.

        Raises:
            ValueError: If `max_shard_size` is no size, or safetensors cannot store a weight.

        Example:
            accelerator.save_model(model, "weights", max_shard_size="2GB")
        """
        from accel.saving import save

        save.save_model(
            self.run, model, save_directory, max_shard_size, safe_serialization, main_process_only
        )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects along with the state.

        Args:
            *objects: Objects with `state_dict` and `load_state_dict`.

        Raises:
            ValueError: If one has not these methods.

        Example:
            accelerator.register_for_checkpointing(scheduler)
        """
        from accel.saving import save

        save.register(self.run, objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before `save_state` writes.

        `weights` has the state of each model (this process's shard of it where checkpoints are sharded), but
        not of those in an engine's own files (DeepSpeed, LOCAL_STATE_DICT). What a hook takes out of this
        list is not saved: the hook writes it itself.

        Args:
            hook: The function.

        Returns:
            A handle whose `remove()` takes the hook off.

        Example:
            counts = []
            handle = accelerator.register_save_state_pre_hook(
                lambda models, weights, output_dir: counts.append(len(models))
            )
            accelerator.save_state("checkpoints/epoch_0")
            handle.remove()
            assert counts == [1]
        """
        return hooks.register(self.run.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before `load_state` reads.

        The weights of a model that a hook takes out of the list are not loaded, but for those in an engine's
        own files; its optimizer's state is.

        Args:
            hook: The function.

        Returns:
            A handle whose `remove()` takes the hook off.

        Example:
            counts = []
            handle = accelerator.register_load_state_pre_hook(
                lambda models, input_dir: counts.append(len(models))
            )
            accelerator.load_state(accelerator.save_state("checkpoints/epoch_0"))
            handle.remove()
            assert counts == [1]
        """
        return hooks.register(self.run.load_hooks, hook)

    # Trackers

    @property
    def log_with(self) -> list[str | GeneralTracker]:
        """The trackers that `init_trackers` starts."""
        return self.tracking.log_with

    @log_with.setter
    def log_with(self, log_with: list[str | GeneralTracker]) -> None:
        self.tracking.log_with = log_with

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that were started by the last `init_trackers`, also after their end."""
        return self.tracking.trackers

    @trackers.setter
    def trackers(self, trackers: list[GeneralTracker]) -> None:
        self.tracking.trackers = trackers

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start the trackers of `log_with` and store the run's configuration.

        Trackers that log on the main process alone are made there alone. One that cannot start is left out,
        with a warning. Those of an earlier call are finished first.

        Args:
            project_name: The run's or project's name.
            config: The run's configuration.
            init_kwargs: Further constructor arguments, by tracker name.

        Example:
            accelerator.init_trackers("my_project", config={"lr": 1e-3})
            accelerator.log({"loss": 0.5}, step=1)
            accelerator.end_training()
        """
        self.tracking.init_trackers(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker called `name`, also after its end.

        Where it could not start, because its library is missing or it raised an error, and on processes
        where it does not run, it is one that does nothing.

        Args:
            name: Its name.
            unwrap: Return its library's run object instead; likewise.

        Returns:
            A GeneralTracker; with `unwrap` what its library calls a run.

        Raises:
            ValueError: On every process, if `log_with` has no such tracker, or before `init_trackers`.

        Example:
            accelerator.init_trackers("my_project")
            tracker = accelerator.get_tracker("jsonl")
        """
        return self.tracking.get_tracker(name, unwrap)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log values to each tracker. Errors of a tracker are warnings, and training continues.

        Args:
            values: Numbers, strings or dicts of them, by name.
            step: The step.
            log_kwargs: Further arguments, by tracker name.

        Example:
            accelerator.log({"loss": loss.item()}, step=10)
        """
        self.tracking.log(values, step, log_kwargs)

    def log_images(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log images to each tracker that has them.

        Args:
            values: By name: an image, a batch or a list of images (tensors, arrays or PIL's); see
                `accel.trackers.values.images` for their shapes.
            step: The step.
            log_kwargs: Further arguments, by tracker name.

        Example:
            accelerator.log_images({"inputs": torch.rand(2, 3, 8, 8)}, step=10)
        """
        self.tracking.log_images(values, step, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Log a table to each tracker that has them.

        Args:
            table_name: Its name.
            columns: Names of the columns.
            data: The rows.
            dataframe: A pandas DataFrame, instead of columns and rows.
            step: The step.
            log_kwargs: Further arguments, by tracker name.

        Example:
            accelerator.log_table("answers", columns=["text", "score"], data=[["yes", 0.9]])
        """
        self.tracking.log_table(table_name, columns, data, dataframe, step, log_kwargs)

    # This process, and the mesh

    @property
    def process(self) -> ProcessInfo:
        """The facts of this process."""
        return self.run.state.process

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.process.device

    @property
    def num_processes(self) -> int:
        """Number of processes of the run."""
        return self.process.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process among all, from 0."""
        return self.process.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine, from 0."""
        return self.process.local_rank

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.process.world_size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of the run."""
        return self.process.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process on its machine."""
        return self.process.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of the run."""
        return self.process.is_last

    @property
    def backend(self) -> str | None:
        """The communication backend; None for one process."""
        return self.process.backend

    @property
    def debug(self) -> bool:
        """Whether collectives are compared between processes before they run (ACCELERATE_DEBUG_MODE)."""
        return self.process.debug

    @debug.setter
    def debug(self, value: bool) -> None:
        self.state.debug = value

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the mesh dimensions, where they were set."""
        return self.plan.parallelism

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh of the parallelism config, or the one that the engine made, else None."""
        return self.engine.data_parallel.mesh

    @property
    def data_parallel_rank(self) -> int:
        """This process's coordinate along dp_replicate.

        Raises:
            RuntimeError: If there is no mesh.
        """
        return mesh_rank(self.torch_device_mesh, "dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process's coordinate along dp_shard.

        Raises:
            RuntimeError: If there is no mesh.
        """
        return mesh_rank(self.torch_device_mesh, "dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's coordinate along tp.

        Raises:
            RuntimeError: If there is no mesh.
        """
        return mesh_rank(self.torch_device_mesh, "tp")

    @property
    def context_parallel_rank(self) -> int:
        """This process's coordinate along cp.

        Raises:
            RuntimeError: If there is no mesh.
        """
        return mesh_rank(self.torch_device_mesh, "cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This process's coordinate along pp.

        Raises:
            RuntimeError: If there is no mesh.
        """
        return mesh_rank(self.torch_device_mesh, "pp")

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here; nothing for one process.

        Raises:
            RuntimeError: If the process group has been destroyed.

        Example:
            accelerator.wait_for_everyone()
        """
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that the main process runs first, and the others after it.

        The others continue even if it fails on the main process.

        Example:
            with accelerator.main_process_first():
                dataset = list(range(100))  # downloaded by one process, read from its cache by the others
        """
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that the first process of each machine runs first, and the others after it.

        The others continue even if it fails on the first process.

        Example:
            with accelerator.local_main_process_first():
                dataset = list(range(100))
        """
        return self.state.local_main_process_first()

    def split_between_processes(self, inputs: T, apply_padding: bool = False) -> AbstractContextManager[T]:
        """Return a context that gives each process its contiguous part of the inputs, in order.

        Parts differ by at most one element; the first processes have the larger ones.

        Args:
            inputs: A list, tuple, range, tensor, array or `datasets.Dataset`, or a dict of such (also nested)
                of one length, which are split in the same way.
            apply_padding: Make all parts equally long by repeating the last element, so that outputs can be
                gathered: cut to `len(inputs)`, they are in the order of the inputs.

        Raises:
            TypeError: If the inputs are of another type.
            ValueError: If the values of a dict differ in length.

        Example:
            with accelerator.split_between_processes(["a", "b", "c"]) as prompts:
                outputs = [prompt.upper() for prompt in prompts]
            assert accel.utils.gather_object(outputs) == ["A", "B", "C"]
        """
        return self.state.split_between_processes(inputs, apply_padding)

    @overload
    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_main_process(self, function: None = None) -> Decorator: ...
    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the main process runs it; elsewhere it returns None.

        Args:
            function: The function; without it a decorator is returned.

        Example:
            @accelerator.on_main_process
            def report(value):
                return f"loss {value}"
            assert (report(0.5) == "loss 0.5") == accelerator.is_main_process
        """
        return self.state.on_main_process(function)

    @overload
    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_local_main_process(self, function: None = None) -> Decorator: ...
    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the first process of each machine runs it; elsewhere it returns
        None.

        Args:
            function: The function; without it a decorator is returned.

        Example:
            @accelerator.on_local_main_process
            def report(value):
                return f"loss {value}"
            assert (report(0.5) == "loss 0.5") == accelerator.is_local_main_process
        """
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function so that only the last process runs it; elsewhere it returns None.

        Args:
            function: The function.

        Example:
            @accelerator.on_last_process
            def report(value):
                return f"loss {value}"
            assert (report(0.5) == "loss 0.5") == accelerator.is_last_process
        """
        return self.state.on_last_process(function)

    @overload
    def on_process(self, function: Callable[P, R], process_index: int) -> Callable[P, R | None]: ...
    @overload
    def on_process(self, function: None = None, *, process_index: int) -> Decorator: ...
    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function so that only one process runs it; elsewhere it returns None.

        A run of one process runs it whatever the index, so that nothing is left undone there.

        Args:
            function: The function; without it a decorator is returned.
            process_index: Rank of the process.

        Raises:
            ValueError: If no process index is passed.

        Example:
            @accelerator.on_process(process_index=0)
            def report(value):
                return f"loss {value}"
            assert (report(0.5) == "loss 0.5") == (accelerator.process_index == 0)
        """
        return self.state.on_process(function, process_index)  # type: ignore[arg-type]

    @overload
    def on_local_process(
        self, function: Callable[P, R], local_process_index: int
    ) -> Callable[P, R | None]: ...
    @overload
    def on_local_process(self, function: None = None, *, local_process_index: int) -> Decorator: ...
    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate a function so that only one process of each machine runs it; elsewhere it returns None.

        A run of one process runs it whatever the index, so that nothing is left undone there.

        Args:
            function: The function; without it a decorator is returned.
            local_process_index: Rank of the process on its machine.

        Raises:
            ValueError: If no process index is passed.

        Example:
            @accelerator.on_local_process(local_process_index=0)
            def report(value):
                return f"loss {value}"
            assert (report(0.5) == "loss 0.5") == (accelerator.local_process_index == 0)
        """
        return self.state.on_local_process(function, local_process_index)  # type: ignore[arg-type]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine.

        Args:
            *args: As for `print`.
            **kwargs: As for `print`.

        Example:
            accelerator.print("step", accelerator.step)
        """
        self.state.print(*args, **kwargs)

    # Profiling, and the end

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[torch.profiler.profile]:
        """Return a context that profiles the code inside with torch's profiler.

        Args:
            profile_handler: Options; by default those of `kwargs_handlers`, else those of ProfileKwargs. With
                a schedule, call the profiler's `step()` at the end of each step. With `output_trace_dir`
                each process writes a Chrome trace there.

        Returns:
            A context manager that yields a `torch.profiler.profile`.

        Example:
            with accelerator.profile() as profiler:
                outputs = model(inputs)
            print(profiler.key_averages().table(row_limit=5))
        """
        from accel.observe.profiling.recording import profile

        return profile(self.process, profile_handler or self.handlers.profile or ProfileKwargs())

    def end_training(self) -> None:
        """Wait for the save in the background, finish the trackers, leave the process group. Call it last.

        Example:
            accelerator.end_training()
        """
        ending.end_training(self.run)
