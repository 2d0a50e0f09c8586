"""What the owners have in common whose processes train one model together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from accel.engines.loose import LooseTensors, average_gradients
from accel.engines.replicas import ReplicaCheck
from accel_optim.owner import ParameterOwner

if TYPE_CHECKING:
    from accel_state.process import Process

__all__ = ["TrainingOwner"]


class TrainingOwner(ParameterOwner):
    """Parameters of models that several processes train, and of tensors beside them.

    Args:
        process: This process.
    """

    def __init__(self, process: Process) -> None:
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

    @contextlib.contextmanager
    def _counted_holding(self) -> Iterator[None]:
        self._num_holding += 1
        try:
            yield
        finally:
            self._num_holding -= 1

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stands for a parameter of a model, though the model does not show it now."""
        return False

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Find what optimizers step and no model has; nothing as long as there is no model."""
        if self._models:
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
        if self._has_new:
            self._has_new = False
            average_gradients(self._loose.trained(), self._process)

    def before_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Reduce what is left, and have no forward pass compute with what was gathered before."""
        self.finish_window()
        self.show_present()
        if not self.may_differ:
            self._check.before_step(parameters, self._models)
