"""How an engine's models and optimizers are saved and loaded: the third part of the engine interface."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from accel.engines.common.checks import check_foreign
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.engines.base.context import EngineContext


class _Engine(Protocol):
    name: str
    context: EngineContext

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module: ...


class States:
    """Whole states, which the main process writes; made anew whenever it is asked for.

    Args:
        engine: Whose models and optimizers are saved and loaded.
    """

    def __init__(self, engine: _Engine) -> None:
        self.engine = engine

    keeps_open_window = True
    """Whether the gradients of an open accumulation window are where a checkpoint finds them."""

    @property
    def saves_parts(self) -> bool:
        """Whether each process writes its own part of models and optimizers into a checkpoint."""
        return False

    @property
    def gathers_parts(self) -> bool:
        """Whether whole states are gathered from what FSDP has sharded, and saved in the form of such."""
        return False

    @property
    def saves_model(self) -> bool:
        """Whether this process holds weights to be written; of replicas, the main one alone does."""
        return self.engine.context.process.is_main

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's full state on this process, under the names of the unwrapped model when `unwrap`."""
        if unwrap:
            # Without names that wrappers add: any engine, and a plain model, can load such a file.
            model = self.engine.unwrap_model(model, keep_torch_compile=False)
        return model.state_dict()

    def state_root(self, model: torch.nn.Module) -> torch.nn.Module:
        """The part of a prepared model that its parts are saved from and loaded into."""
        return self.engine.unwrap_model(model, keep_torch_compile=False)

    def model_to_load(self, model: torch.nn.Module) -> Any:
        """The object that a full state is loaded into: it has a state_dict and a load_state_dict."""
        return model

    def check_save(self, optimizers: Iterable[Any]) -> None:
        """Reject what cannot be saved, before anything is written.

        Raises:
            ValueError: With the reason and the alternative.
        """

    def optimizer_to_save(self, optimizer: torch.optim.Optimizer) -> Any:
        """The object with the optimizer's full state on the processes that write; all processes call it."""
        return optimizer

    def optimizer_to_load(self, optimizer: torch.optim.Optimizer) -> Any:
        """The object that a full optimizer state is loaded into."""
        return optimizer

    def has_all_names(self, model: torch.nn.Module) -> bool:
        """Whether every process has a tensor, or a part of it, under each name of a prepared model."""
        return True

    def is_part(self, tensor: torch.Tensor) -> bool:
        """Whether this process has a part of its own of a tensor, and no mesh says which."""
        return False

    def is_own(self, item: Any) -> bool:
        """Whether a prepared model or optimizer is saved by `save_own`, and by nobody else."""
        return False

    def save_own(self, folder: Path, **options: Any) -> None:
        """Write what the engine saves by itself into a checkpoint; every process calls it.

        Args:
            folder: The checkpoint's folder.
            **options: What `save_state` was given for it; an engine that takes none warns.
        """
        # Warned of, and not an error: one script may save under several engines.
        if options:
            warn(
                f"save_state ignores {', '.join(options)}: the {self.engine.name} engine saves without "
                "options.",
            )

    def check_own(self, names: Collection[str]) -> None:
        """Reject a checkpoint that the engine cannot go on from, before anything is changed.

        Args:
            names: Its files.

        Raises:
            CheckpointError: If it cannot.
        """
        check_foreign(names, self.engine.name)

    def load_own(self, folder: Path, **options: Any) -> None:
        """Load what `save_own` wrote; every process calls it.

        Args:
            folder: The checkpoint's folder.
            **options: What `load_state` was given for it.
        """
