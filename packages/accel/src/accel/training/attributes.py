"""The documented attributes of an Accelerator that are parts of its run, or settings in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from accel_state.verify import output_path

if TYPE_CHECKING:
    import torch

    from accel.engines import Engine
    from accel.training.run import HasRun, Run
    from accel_ckpt.config import ProjectConfiguration
    from accel_data.config import DataLoaderConfiguration
    from accel_optim.scheduler import AcceleratedScheduler
    from accel_optim.window import Window
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.enums import DistributedType, RNGType
    from accel_state.gradient import GradientState
    from accel_state.process.info import ProcessInfo

_T = TypeVar("_T")


class _Part(Generic[_T]):
    """An attribute of an Accelerator that is a part of its run, to read and to replace."""

    def __init__(self, name: str | None = None) -> None:
        self._name = name or ""

    def __set_name__(self, owner: type[HasRun], name: str) -> None:
        self._name = self._name or name  # a given name is that of the run's attribute

    def __get__(self, accelerator: HasRun | None, owner: type[HasRun]) -> _T:
        if accelerator is None:  # asked of the class
            return self  # type: ignore[return-value]
        return getattr(accelerator.run, self._name)  # type: ignore[no-any-return]

    def __set__(self, accelerator: HasRun, value: _T) -> None:
        setattr(accelerator.run, self._name, value)


class RunAttributes:
    """Mixin with the parts of the run, to read and to replace, and the settings in them.

    A subclass has the attributes that are declared here.
    """

    run: Run

    state: _Part[AcceleratorState] = _Part()
    gradient_state: _Part[GradientState] = _Part()
    window: _Part[Window] = _Part()
    scaler: _Part[torch.amp.GradScaler | None] = _Part()
    engine: _Part[Engine] = _Part()
    project_configuration: _Part[ProjectConfiguration] = _Part()
    dataloader_config: _Part[DataLoaderConfiguration] = _Part()
    rng_types: _Part[list[RNGType]] = _Part()
    device_placement: _Part[bool] = _Part()
    step_scheduler_with_optimizer: _Part[bool] = _Part()

    # Programs that know them read these, transformers' Trainer among them.
    _models: _Part[list[torch.nn.Module]] = _Part("models")
    _optimizers: _Part[list[torch.optim.Optimizer]] = _Part("optimizers")
    _schedulers: _Part[list[AcceleratedScheduler]] = _Part("schedulers")
    _dataloaders: _Part[list[Any]] = _Part("loaders")
    _custom_objects: _Part[list[Any]] = _Part("registered")

    @property
    def process(self) -> ProcessInfo:
        """The facts of this process."""
        return self.run.state.process

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
        """Whether several accelerator devices train together (MULTI_GPU and the like)."""
        return self.process.world_size > 1 and self.process.device.type != "cpu"

    @property
    def fp8_backend(self) -> str | None:
        """The library that computes in fp8: "AO", "TE" or "MSAMP"; None in other precisions."""
        return self.engine.context.fp8.backend if self.engine.context.fp8 is not None else None

    @property
    def project_dir(self) -> str | None:
        """The project's folder."""
        return output_path(self.project_configuration.project_dir)

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        return output_path(self.project_configuration.logging_dir)

    @property
    def save_iteration(self) -> int:
        """The number that the next automatically named checkpoint gets, or a higher one: above all there."""
        return self.project_configuration.iteration

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batches are split over the processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all; None: for iterable datasets only."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether every process gets the same number of full batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether random samplers are replaced by SeedableRandomSampler."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders are torchdata's StatefulDataLoader."""
        return self.dataloader_config.use_stateful_dataloader
