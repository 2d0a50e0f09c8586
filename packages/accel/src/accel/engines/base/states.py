"""How an engine saves and loads models and optimizers."""

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
    """Full states, which the main process writes; created on each access.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: _Engine) -> None:
        self.engine = engine

    can_save_mid_window = True
    """Whether a checkpoint can include the gradients of an open accumulation window."""

    @property
    def saves_sharded(self) -> bool:
        """Whether each process writes its shards of models and optimizers into a checkpoint."""
        return False

    @property
    def gathers_full_state(self) -> bool:
        """Whether full states are gathered from FSDP shards, and saved in FSDP's format."""
        return False

    @property
    def saves_model(self) -> bool:
        """Whether this process has weights to write; among replicas only the main process."""
        return self.engine.context.process.is_main

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's full state on this process, under the names of the unwrapped model when `unwrap`."""
        if unwrap:
            # Without the name prefixes of wrappers: any engine, and a plain model, can load such a file.
            model = self.engine.unwrap_model(model, keep_torch_compile=False)
        return model.state_dict()

    def state_root(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module of a prepared model whose shards are saved and loaded."""
        return self.engine.unwrap_model(model, keep_torch_compile=False)

    def model_to_load(self, model: torch.nn.Module) -> Any:
        """The object to load a full state into, with `state_dict` and `load_state_dict`."""
        return model

    def check_save(self, optimizers: Iterable[Any]) -> None:
        """Reject what cannot be saved, before anything is written.

        Raises:
            ValueError: With the reason and the alternative.
        """

    def optimizer_to_save(self, optimizer: torch.optim.Optimizer) -> Any:
        """The object with the optimizer's full state on the processes that write; all processes call this."""
        return optimizer

    def optimizer_to_load(self, optimizer: torch.optim.Optimizer) -> Any:
        """The object to load a full optimizer state into."""
        return optimizer

    def has_all_names(self, model: torch.nn.Module) -> bool:
        """Whether every process has a tensor, or a shard of it, under each name of a prepared model."""
        return True

    def is_shard(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a shard without a mesh that describes it."""
        return False

    def has_native_checkpoint(self, item: Any) -> bool:
        """Whether only `save_native` saves a prepared model or optimizer."""
        return False

    def save_native(self, folder: Path, **options: Any) -> None:
        """Write the engine's own format into a checkpoint; every process calls it.

        Args:
            folder: The checkpoint's folder.
            **options: Additional arguments of `save_state`; an engine without options warns of them.
        """
        # A warning and no error: one script may save under several engines.
        if options:
            warn(
                f"save_state ignores {', '.join(options)}: the {self.engine.name} engine saves without "
                "options.",
            )

    def check_native(self, names: Collection[str]) -> None:
        """Reject a checkpoint that the engine cannot load, before anything is changed.

        Args:
            names: The file names of the checkpoint.

        Raises:
            CheckpointError: If the engine cannot load it.
        """
        check_foreign(names, self.engine.name)

    def load_native(self, folder: Path, **options: Any) -> None:
        """Load what `save_native` wrote; every process calls it.

        Args:
            folder: The checkpoint's folder.
            **options: Additional arguments of `load_state`.
        """
