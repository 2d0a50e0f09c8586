"""The base of trackers whose library begins a run of a project by one call."""

from __future__ import annotations

from typing import Any

from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.values import plain
from accel_state.imports.packages import require


class RunTracker(GeneralTracker):
    """Logs to a run that the library's `init(project=..., **kwargs)` begins and the run's `finish()` ends.

    A subclass sets `name`, which is the library's and the extra's too, and logs to `run`.

    Args:
        run_name: The project's name.
        **kwargs: Further arguments of the library's `init`.

    Attributes:
        run: What `init` returned; None before `start`.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.run: Any = None
        self._kwargs = kwargs
        self._library: Any = None

    @property
    def tracker(self) -> Any:
        """The run, as the library returns it."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        self._library = require(self.name, extra=self.name)
        # A project among the arguments comes before the run's name.
        self.run = self._library.init(**{"project": self.run_name, **self._kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store `values`, nested as they are, in the run's `config`."""
        self.run.config.update(plain(values))

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()
