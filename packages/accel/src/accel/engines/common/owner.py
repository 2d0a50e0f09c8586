"""Base classes of owners for engines whose processes train one model together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from accel.engines.common.loose import LooseTensors, average_gradients
from accel.engines.common.replica_check import ReplicaCheck
from accel_optim.owner import ParameterOwner

if TYPE_CHECKING:
    from types import TracebackType

    from accel_state.process.info import ProcessInfo


class TrainingOwner(ParameterOwner):
    """Parameters of models that several processes train, and of tensors beside them.

    Args:
        process: This process.
    """

    def __init__(self, process: ProcessInfo) -> None:
        self._process = process
        # In order: all processes go through them alike.
        self._models: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._loose = LooseTensors(process)
        self._check = ReplicaCheck(process)
        self._has_new = False
        self._num_holding = 0

    @property
    def is_holding(self) -> bool:
        """Whether backward passes leave gradients on their process now."""
        return self._num_holding > 0

    @property
    def may_differ(self) -> bool:
        """Whether replicas are apart for now, or processes do not step together."""
        return self.is_holding

    def holding(
        self, no_sync: contextlib.AbstractContextManager[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """A context whose backward passes leave gradients on their process.

        Args:
            no_sync: The context that makes them so.
        """
        return _Holding(self, no_sync)

    def start_holding(self) -> None:
        """Note that a context of `holding` begins."""
        # A number, as contexts of several models are entered at once and inside each other.
        self._num_holding += 1

    def stop_holding(self) -> None:
        """Note that a context of `holding` ends."""
        self._num_holding -= 1

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stands for a parameter of a model, though the model does not show it now."""
        return False

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Find what optimizers step and no model has; nothing as long as there is no model."""
        if self._models:
            # By identity: `==` of tensors compares their elements.
            shown = {id(item) for model in self._models for item in model.parameters()}
            self._loose.take(parameters, lambda item: id(item) in shown or self.owns(item))

    def averages(self, parameter: torch.Tensor) -> bool:
        """Whether a tensor belongs to no model and is stepped by a prepared optimizer."""
        return any(item is parameter for item in self._loose.trained())

    def after_backward(self, retains_graph: bool) -> None:
        """Note that there are new gradients."""
        self._has_new = True

    def finish_window(self) -> None:
        """Reduce what is left: the gradients of tensors that no model has."""
        # Once per window: clipping, unscaling and the step all come here.
        if self._has_new:
            self._has_new = False
            average_gradients(self._loose.trained(), self._process)

    def before_step(self, param_groups: list[dict[str, Any]]) -> None:
        """Reduce what is left, and have no forward pass compute with what was gathered before."""
        self.finish_window()
        self.show_present()
        if self._check.every and not self.may_differ:
            self._check.before_step(
                (item for group in param_groups for item in group["params"]), self._models
            )


class _Holding:
    """The context of `holding`; a class, as a generator would take twice the time of all that it does."""

    __slots__ = ("no_sync", "owner")

    def __init__(self, owner: TrainingOwner, no_sync: contextlib.AbstractContextManager[Any]) -> None:
        self.owner = owner
        self.no_sync = no_sync

    def __enter__(self) -> None:
        self.owner.start_holding()
        try:
            self.no_sync.__enter__()
        except BaseException:
            self.owner.stop_holding()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.no_sync.__exit__(kind, error, traceback)
        finally:
            self.owner.stop_holding()


class ShardOwner(TrainingOwner):
    """Parameters in parts, whose gradients are kept whole outside of `.grad` until the window ends."""

    def start_holding(self) -> None:
        """Note that a context begins whose backward passes keep whole gradients until the window ends."""
        self.holds_back = True
        super().start_holding()

    def after_backward(self, retains_graph: bool) -> None:
        """Note that there are new gradients, and whether they are held back."""
        super().after_backward(retains_graph)
        # Also a backward pass outside of the context keeps what was held before.
        self.holds_back |= self.is_holding

    def finish_window(self) -> None:
        """Reduce what a window keeps whose last micro-batch had no backward pass, and loose tensors."""
        if self.holds_back:
            # Before reducing: an error there must not have the next step reduce again.
            self.holds_back = False
            self.reduce_held()
        super().finish_window()

    def forget_gradients(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Drop whole gradients that are held back."""
        if self.holds_back:
            self.forget_held(None if parameters is None else {id(item) for item in parameters})

    def reduce_held(self) -> None:
        """Reduce the gradients that are held back."""
        raise NotImplementedError

    def forget_held(self, wanted: set[int] | None) -> None:
        """Drop the gradients that are held back.

        Args:
            wanted: The `id` of each stepped tensor whose gradient is dropped; None for all.
        """
        raise NotImplementedError
