"""The base class of observers: the events of a run that they are notified of."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Observer:
    """Observes one run; each method does nothing by default.

    No step asks for observers. What one wants to see of each step it attaches to the objects that it is
    notified of, and takes off again in `stop`.
    """

    def model_prepared(self, model: torch.nn.Module) -> None:
        """A model was prepared."""

    def optimizer_prepared(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was prepared."""

    def loader_prepared(self, loader: Any) -> None:
        """A loader was prepared."""

    def saving(self) -> AbstractContextManager[None]:
        """A context for `save_state`."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        """A context for `load_state`."""
        return nullcontext()

    def stop(self) -> None:
        """Take off what was attached, and report what is to be reported: training ends."""
