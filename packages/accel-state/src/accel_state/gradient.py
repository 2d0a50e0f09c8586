"""The state of gradient accumulation: whether gradients are synchronised now, and which loader is being read.

Each Accelerator has its own state, made by `GradientState.new`. A bare `GradientState()` is a handle on
the newest one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from accel_state.open_loaders import OpenLoaders
from accel_state.process.shared_dict import shared_dict

if TYPE_CHECKING:
    from accel_state.handlers import GradientAccumulationPlugin
    from accel_state.step_events import StepEvents


class GradientState:
    """A handle on the state of gradient accumulation.

    Args:
        gradient_accumulation_plugin: How gradients are accumulated. Without it the handle is on the newest
            state (created with one step, if there is none); with one that differs from the newest state's,
            a new state is created, which is then the newest.

    Attributes:
        sync_gradients: Whether the current micro-batch ends the window, so that gradients are synchronised.
        plugin_kwargs: The settings of the accumulation plugin; may be changed in place.
        events: The observers of the steps of this state; None without an observer.
    """

    sync_gradients: bool
    events: StepEvents | None
    plugin_kwargs: dict[str, Any]
    _is_xla_synced: bool
    _loaders: OpenLoaders

    _shared_state: ClassVar[dict[str, Any]] = shared_dict()

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        newest: dict[str, Any] | None = GradientState._shared_state.get("newest")
        # As values: the user may still change the plugin object.
        kwargs = None if gradient_accumulation_plugin is None else gradient_accumulation_plugin.to_dict()
        if newest is None or kwargs not in (None, newest["plugin_kwargs"]):
            newest = GradientState._shared_state["newest"] = _new_state(kwargs or {})
        # All handles on one state share one namespace: a loop reads it often in every micro-batch.
        self.__dict__ = newest

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle_on, (self.__dict__,)  # handles copied in one call stay on one state

    @classmethod
    def new(cls, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> GradientState:
        """Create an independent state, which is then the newest.

        Args:
            gradient_accumulation_plugin: How gradients are accumulated; None for one step.

        Returns:
            A handle on it.
        """
        kwargs = {} if gradient_accumulation_plugin is None else gradient_accumulation_plugin.to_dict()
        GradientState._shared_state["newest"] = _new_state(kwargs)
        return cls()

    @property
    def initialized(self) -> bool:
        """Whether a state exists (not before the first one, nor after a reset)."""
        return bool(GradientState._shared_state)

    @property
    def num_steps(self) -> int:
        """Number of micro-batches that are accumulated before a step."""
        # None is left to the Accelerator; a handle created without a plugin has no key.
        return self.plugin_kwargs.get("num_steps") or 1

    @property
    def adjust_scheduler(self) -> bool:
        """Whether a scheduler's calls inside a window are counted; they never change the learning rate."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", True))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of a loader ends the window, also when it is not full."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are synchronised in every micro-batch (less memory in some engines)."""
        return bool(self.plugin_kwargs.get("sync_each_batch", False))

    @property
    def step_scheduler_per_process(self) -> bool:
        """Whether schedules move once per process at each optimizer step, or once."""
        return bool(self.plugin_kwargs.get("step_scheduler_per_process", True))

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether XLA gradients have been reduced in this window."""
        return self._is_xla_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, is_synced: bool) -> None:
        self._is_xla_synced = is_synced

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether the current micro-batch ends the window; XLA gradients count as not reduced yet."""
        self.sync_gradients = sync_gradients
        self._is_xla_synced = False

    @property
    def active_dataloader(self) -> Any:
        """The loader being iterated that gave the last batch, or None."""
        active = self._loaders.active
        return None if active is None else active.loader

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated, outermost first; only weak references to them are kept."""
        return [one.loader for one in self._loaders.passes]

    @dataloader_references.setter
    def dataloader_references(self, loaders: Iterable[Any]) -> None:
        self._loaders.set_open([loader for loader in loaders if loader is not None])

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def _is_in_training_loop(self) -> bool:
        """Whether the loader that the window follows is being iterated; any loader, before it follows one."""
        return self.in_dataloader and not self._loaders.loop_has_ended

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
        """Record that iteration over a loader begins."""
        self._loaders.begin(dataloader)

    def _record_batch(self, dataloader: Any) -> None:
        """Record that a loader gives a batch."""
        self._loaders.record_batch(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Record that iteration over a loader has ended; a no-op for unknown loaders."""
        self._loaders.end(dataloader)

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


def _new_state(plugin_kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        "plugin_kwargs": plugin_kwargs,
        "sync_gradients": True,
        "_is_xla_synced": False,
        "_loaders": OpenLoaders(),
        "events": None,
    }


def _handle_on(state: dict[str, Any]) -> GradientState:
    handle = object.__new__(GradientState)
    handle.__dict__ = state
    return handle
