"""Where gradient accumulation stands: whether gradients are synchronised now, and which loader is being read.

Each Accelerator has a state of its own, made by `GradientState.new`. A bare `GradientState()` is a handle on
the newest one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from accel_state.process.shared_dict import shared_dict

if TYPE_CHECKING:
    from accel_state.handlers import GradientAccumulationPlugin

__all__ = ["GradientState"]


@dataclass
class _Window:
    plugin_kwargs: dict[str, Any]
    sync_gradients: bool = True
    is_xla_gradients_synced: bool = False
    loaders: list[weakref.ref[Any]] = field(default_factory=list)  # outermost first

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "loaders": []}  # a copy reads none


class GradientState:
    """A handle on the state of gradient accumulation.

    Args:
        gradient_accumulation_plugin: How gradients are accumulated. Without it the handle is on the newest
            state (one is made, of one step, if there is none); with one that differs from the newest state's,
            a new state is made, which is the newest from then on.
    """

    _shared_state: ClassVar[dict[str, Any]] = shared_dict()

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        newest: _Window | None = GradientState._shared_state.get("newest")
        kwargs = None if gradient_accumulation_plugin is None else gradient_accumulation_plugin.to_dict()
        if newest is None or kwargs not in (None, newest.plugin_kwargs):
            newest = GradientState._shared_state["newest"] = _Window(kwargs or {})
        self._window = newest

    @classmethod
    def new(cls, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> GradientState:
        """Make an independent state, which is the newest from then on.

        Args:
            gradient_accumulation_plugin: How gradients are accumulated; None for one step.

        Returns:
            A handle on it.
        """
        kwargs = {} if gradient_accumulation_plugin is None else gradient_accumulation_plugin.to_dict()
        GradientState._shared_state["newest"] = _Window(kwargs)
        return cls()

    @property
    def initialized(self) -> bool:
        """Whether there is a state (not before the first one, nor after a reset)."""
        return bool(GradientState._shared_state)

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The settings of the accumulation plugin; may be changed in place."""
        return self._window.plugin_kwargs

    @property
    def num_steps(self) -> int:
        """Number of micro-batches that are accumulated before a step."""
        return self._window.plugin_kwargs.get("num_steps") or 1

    @property
    def adjust_scheduler(self) -> bool:
        """Whether a scheduler's calls inside a window are counted; they never change the learning rate."""
        return bool(self._window.plugin_kwargs.get("adjust_scheduler", True))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of a loader ends the window, also when it is not full."""
        return bool(self._window.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are synchronised in every micro-batch (less memory in some engines)."""
        return bool(self._window.plugin_kwargs.get("sync_each_batch", False))

    @property
    def step_scheduler_per_process(self) -> bool:
        """Whether schedules move once per process at each optimizer step, or once."""
        return bool(self._window.plugin_kwargs.get("step_scheduler_per_process", True))

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch at hand ends the window, so that gradients are synchronised."""
        return self._window.sync_gradients

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether XLA gradients have been reduced in this window."""
        return self._window.is_xla_gradients_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, is_synced: bool) -> None:
        self._window.is_xla_gradients_synced = is_synced

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Say whether the micro-batch at hand ends the window; XLA gradients count as not reduced yet."""
        self._window.sync_gradients = sync_gradients
        self._window.is_xla_gradients_synced = False

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader that is being iterated, or None."""
        loaders = self._window.loaders
        while loaders:
            loader = loaders[-1]()
            if loader is not None:
                return loader
            loaders.pop()
        return None

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated, outermost first; only weak references to them are kept."""
        return [
            loader for loader in (reference() for reference in self._window.loaders) if loader is not None
        ]

    @dataloader_references.setter
    def dataloader_references(self, loaders: Iterable[Any]) -> None:
        self._window.loaders[:] = [weakref.ref(loader) for loader in loaders if loader is not None]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has given its last batch; False outside loaders."""
        loader = self.active_dataloader
        return loader is not None and bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Real samples in the active loader's last, padded batch; -1 when unknown or outside loaders."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    def _add_dataloader(self, dataloader: Any) -> None:
        """Note that iteration over a loader begins, inside those noted before."""
        self._window.loaders.append(weakref.ref(dataloader))

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Note that iteration over a loader has ended; nothing if it was not noted."""
        loaders = self._window.loaders
        for position in reversed(range(len(loaders))):
            if loaders[position]() is dataloader:
                del loaders[position]
                return

    @classmethod
    def _reset_state(cls) -> None:
        """Forget the newest state; handles on it keep it."""
        GradientState._shared_state.clear()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )
