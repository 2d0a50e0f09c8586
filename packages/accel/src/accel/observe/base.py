"""The settings of what observes a run, and the contexts in which a run is saved and loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel.observe.observer import Observer
from accel_state.handlers import KwargsHandler

if TYPE_CHECKING:
    from accel.training.run import Run


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
