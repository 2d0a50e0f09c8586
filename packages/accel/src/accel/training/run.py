"""What one Accelerator is made of. Functions take it; only documented ones take the whole Accelerator."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from accel.training.prepared_objects import PreparedObjects

if TYPE_CHECKING:
    import torch

    from accel.engines import Engine
    from accel.training.misuse import MisuseChecker
    from accel_ckpt.config import ProjectConfiguration
    from accel_data.config import DataLoaderConfiguration
    from accel_optim.window import Window
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.enums import RNGType
    from accel_state.gradient import GradientState
    from accel_state.process.info import ProcessInfo
    from accel_state.step_events import Observer


# eq=False: a run is the key of weak references, and equal to itself alone.
@dataclass(eq=False)
class Run:
    """What one Accelerator is made of, and the objects that it has prepared.

    Attributes:
        state: Precision, plugins and the facts of the process.
        gradient_state: The accumulation window's state, which optimizers and loaders follow.
        window: Counts micro-batches.
        scaler: The loss scaler of fp16 training, else None.
        engine: How training is parallelized.
        misuse: Checks the first steps.
        project_configuration: Where checkpoints go.
        dataloader_config: How loaders are sharded.
        rng_types: Generators synchronised at the start of each iteration.
        device_placement: Whether prepared objects and batches go to the device.
        step_scheduler_with_optimizer: Whether schedulers step only when their optimizer did.
        prepared: The prepared objects.
        registered: Objects that are saved and loaded along with the state.
        save_hooks: Called before `save_state` writes.
        load_hooks: Called before `load_state` reads.
        observers: What observes the run until its end; those of its steps are in `gradient_state.events`.
        batch_factor: Makes the batches of loaders so many times as large before they are prepared, and
            prepared schedulers move so many times as far: `accel verify` trains on one process as on several.
        lomo: The prepared optimizer that steps in backward, if there is one.
        warned_types: Types for which `prepare` has warned that it leaves them unchanged.
        has_warned_of_folder: Whether `save_state` has warned that it ignores output_dir.
    """

    state: AcceleratorState
    gradient_state: GradientState
    window: Window
    scaler: torch.amp.GradScaler | None
    engine: Engine
    misuse: MisuseChecker
    project_configuration: ProjectConfiguration
    dataloader_config: DataLoaderConfiguration
    rng_types: list[RNGType]
    device_placement: bool
    step_scheduler_with_optimizer: bool
    prepared: PreparedObjects = field(default_factory=PreparedObjects)
    registered: list[Any] = field(default_factory=list)
    save_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    load_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    observers: list[Observer] = field(default_factory=list)
    batch_factor: int = 1
    lomo: Any = None
    warned_types: set[type] = field(default_factory=set)
    has_warned_of_folder: bool = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for optimizer in self.prepared.optimizers:  # which are pickled without the state that they follow
            optimizer.gradient_state = self.gradient_state  # type: ignore[attr-defined]

    @property
    def process(self) -> ProcessInfo:
        """The facts of this process."""
        return self.state.process


class HasRun(Protocol):
    """An Accelerator, as documented functions take it that need its run alone."""

    run: Run
