"""The tracking side of the Accelerator: starting trackers, finding one, and logging to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel.trackers.base import GeneralTracker
from accel.trackers.registry import tracker_class

if TYPE_CHECKING:
    from accel.training.run import Run

__all__ = ["TrackerControl"]


class TrackerControl:
    """Mixin with everything that tracks experiments.

    A subclass has the attributes that are declared here.
    """

    run: Run
    log_with: Sequence[str | GeneralTracker]
    trackers: list[GeneralTracker]

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start the trackers of `log_with` and store the run's configuration.

        Trackers that log on the main process alone are made there alone.

        Args:
            project_name: The run's or project's name.
            config: The run's configuration.
            init_kwargs: Further constructor arguments, by tracker name.
        """
        self.trackers = []
        for item in self.log_with:
            kind = type(item) if isinstance(item, GeneralTracker) else tracker_class(item)
            if kind.main_process_only and not self.run.process.is_main:
                continue
            if isinstance(item, GeneralTracker):
                tracker = item
            else:
                options = dict((init_kwargs or {}).get(item, {}))
                if kind.requires_logging_directory:
                    options["logging_dir"] = self.run.project_configuration.logging_dir
                make: Any = kind  # constructors of trackers differ
                tracker = make(project_name, **options)
            tracker.start()
            self.trackers.append(tracker)
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker called `name` (or, unwrapped, its library's run object); a blank one elsewhere.

        Raises:
            ValueError: If no such tracker was started.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not self.run.process.is_main:
            return GeneralTracker(_blank=True)  # so that scripts need no `if` around its methods
        started = [tracker.name for tracker in self.trackers]
        raise ValueError(
            f"there is no tracker {name!r}; started are {started}. Name it in log_with, then init_trackers()."
        )

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log `values` to each tracker, with the further arguments that `log_kwargs` has under its name."""
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))
