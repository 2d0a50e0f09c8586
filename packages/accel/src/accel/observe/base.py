"""What observes a run: its settings, and what it is notified of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from accel_state.handlers import KwargsHandler

if TYPE_CHECKING:
    import torch

    from accel.training.run import Run

__all__ = ["Observer", "ObserverKwargs", "observed"]


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
        """A context around `save_state`."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        """A context around `load_state`."""
        return nullcontext()

    def stop(self) -> None:
        """Take off what was attached, and report what is to be reported: training ends."""


class ObserverKwargs(KwargsHandler):
    """Base of the settings of observers, which `kwargs_handlers` takes one of each kind of."""

    def start(self, run: Run) -> Observer:
        """Make the observer of a run that has prepared nothing yet."""
        raise NotImplementedError


@contextlib.contextmanager
def observed(run: Run, kind: str) -> Iterator[None]:
    """Enter a context of all observers of a run.

    Args:
        run: The run.
        kind: "saving" or "loading".
    """
    with contextlib.ExitStack() as contexts:
        for observer in run.observers:
            contexts.enter_context(getattr(observer, kind)())
        yield
