"""The trackers of an Accelerator: starting them, finding one, and logging to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel.trackers.base import BlankTracker, GeneralTracker
from accel.trackers.registry import (
    TRACKERS,
    filter_trackers,
    get_available_trackers,
    has_tracker,
    tracker_class,
)
from accel_state import env
from accel_state.logging.suggestion import did_you_mean
from accel_state.logging.warning import warn
from accel_state.step_events import Observer
from accel_state.verify import is_verifying, output_path

if TYPE_CHECKING:
    from accel_ckpt.config import ProjectConfiguration
    from accel_state.process.info import ProcessInfo


class TrackerSession(Observer):
    """The trackers of one Accelerator.

    Logging never stops training: the first error of a tracker in each of its methods is a warning, and
    training continues. ACCELERATE_STRICT_TRACKERS=1 raises such errors.

    Args:
        process: This process.
        project_configuration: Where trackers write.
        log_with: Trackers, by name or as objects.

    Attributes:
        log_with: The trackers that `init_trackers` starts.
        trackers: Those of the last `init_trackers`, also after their end.
        finished_trackers: Those of them that are finished; None before `init_trackers`.
        failed_trackers: (name, method) of the errors that were reported.
    """

    def __init__(
        self, process: ProcessInfo, project_configuration: ProjectConfiguration, log_with: Any
    ) -> None:
        self._process, self._project_configuration = process, project_configuration
        self.log_with = filter_trackers(log_with, output_path(project_configuration.logging_dir))
        self.trackers: list[GeneralTracker] = []
        self.finished_trackers: list[GeneralTracker] | None = None
        self.failed_trackers: set[tuple[str, str]] = set()

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start the trackers of `log_with` and store the run's configuration.

        Trackers that log on the main process alone are made there alone. One that cannot start is left out,
        with a warning. Those of an earlier call are finished first.

        Args:
            project_name: The run's or project's name.
            config: The run's configuration.
            init_kwargs: Further constructor arguments, by tracker name.
        """
        self.finish_trackers()
        self.trackers, self.finished_trackers, self.failed_trackers = [], [], set()
        if is_verifying():  # a run that is not the user's
            return
        init_kwargs = self._checked("init_kwargs", init_kwargs)
        for item in self.log_with:
            # An object may have another name than its class.
            tracker_type = item if isinstance(item, GeneralTracker) else tracker_class(item)
            # Not even made, so that the other processes need no login and no network.
            if tracker_type.main_process_only and not self._process.is_main:
                continue
            # A copy, to which the folder may be added.
            options = dict(init_kwargs.get(tracker_type.name) or {})
            tracker = self._attempt(
                tracker_type.name, "start", self._start, tracker_type, project_name, options
            )
            if tracker is not None:
                self.trackers.append(tracker)
        if config is not None:
            for tracker in self.trackers:
                store = tracker.store_init_configuration
                self._attempt(tracker.name, "store_init_configuration", store, config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker called `name`, also after its end.

        Where it could not start, for want of its library or for an error, and on processes where it does not
        run, it is one that does nothing.

        Args:
            name: Its name.
            unwrap: Return its library's run object instead; likewise.

        Raises:
            ValueError: On every process, if `log_with` has no such tracker, or before `init_trackers`.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        names = [item.name if isinstance(item, GeneralTracker) else item for item in self.log_with]
        has_no_library = has_tracker(name) and name not in get_available_trackers()
        if has_no_library or is_verifying() or (name in names and self.finished_trackers is not None):
            return BlankTracker()
        if name in names:
            raise ValueError(f"the tracker {name!r} has not been started. Call init_trackers() first.")
        raise ValueError(f"there is no tracker {name!r}; log_with has {names}. Name it there.")

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log `values` to each tracker, with the further arguments that `log_kwargs` has under its name."""
        by_tracker = self._checked("log_kwargs", log_kwargs)
        for tracker in self._running_trackers():
            options = by_tracker.get(tracker.name) or {}
            self._attempt(tracker.name, "log", tracker.log, values, **{"step": step, **options})

    def log_images(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log images to each tracker that has them.

        Args:
            values: By name: an image, a batch or a list of images (tensors, arrays or PIL's); see
                `accel.trackers.values.images` for their shapes.
            step: The step.
            log_kwargs: Further arguments, by tracker name.
        """
        by_tracker = self._checked("log_kwargs", log_kwargs)
        for tracker in self._running_trackers():
            options = by_tracker.get(tracker.name) or {}
            self._attempt(tracker.name, "log_images", tracker.log_images, values, **{"step": step, **options})

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Log a table to each tracker that has them.

        Args:
            table_name: Its name.
            columns: Names of the columns.
            data: The rows.
            dataframe: A pandas DataFrame, instead of columns and rows.
            step: The step.
            log_kwargs: Further arguments, by tracker name.
        """
        by_tracker = self._checked("log_kwargs", log_kwargs)
        table = {"columns": columns, "data": data, "dataframe": dataframe, "step": step}
        for tracker in self._running_trackers():
            options = by_tracker.get(tracker.name) or {}
            self._attempt(tracker.name, "log_table", tracker.log_table, table_name, **{**table, **options})

    def stop(self) -> None:
        """Finish the trackers: training ends."""
        self.finish_trackers()

    def finish_trackers(self) -> None:
        """Finish each tracker once, also where another one fails."""
        errors = []
        for tracker in self._running_trackers():
            # Noted before it is finished, so that one that raises is not finished again.
            self.finished_trackers = [*(self.finished_trackers or []), tracker]
            try:
                self._attempt(tracker.name, "finish", tracker.finish)
            except Exception as error:  # strict: the others are finished first
                errors.append(error)
        if errors:
            raise errors[0]

    def _running_trackers(self) -> list[GeneralTracker]:
        finished = set(map(id, self.finished_trackers or ()))
        return [tracker for tracker in self.trackers if id(tracker) not in finished]

    def _start(
        self,
        tracker_type: GeneralTracker | type[GeneralTracker],
        project_name: str,
        options: dict[str, Any],
    ) -> GeneralTracker:
        if isinstance(tracker_type, GeneralTracker):
            tracker = tracker_type
        else:
            if tracker_type.requires_logging_directory:
                options.setdefault("logging_dir", self._project_configuration.logging_dir)
            make: Any = tracker_type  # constructors of trackers differ
            tracker = make(project_name, **options)
        tracker.start()
        return tracker

    def _attempt(
        self, name: str, method: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the function; an error is a warning the first time, and raised where trackers are strict."""
        # Positional parameters only: options of a tracker may be called "name" too.
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if env.get("ACCELERATE_STRICT_TRACKERS"):
                raise
            if (name, method) in self.failed_trackers:
                return None
            self.failed_trackers.add((name, method))
            process = self._process
            where = "" if process.is_main else f" on process {process.rank}"
            lost = "nothing is logged there" if method == "start" else "what it was given is not logged there"
            warn(
                f"The {name} tracker failed in {method}(){where}: {type(error).__name__}: {error}. Training "
                f"goes on; {lost}. This warning comes once; ACCELERATE_STRICT_TRACKERS=1 raises the error.",
                about="process",
            )
        return None

    def _checked(self, argument: str, options: dict[str, Any] | None) -> dict[str, Any]:
        """Return options by tracker name, and warn of those that no tracker gets."""
        if not options:
            return {}
        names = [item.name if isinstance(item, GeneralTracker) else item for item in self.log_with]
        for name in options:
            # Scripts have options for several trackers, but use one of them.
            if name not in names and not has_tracker(name):
                hint = did_you_mean(name, [*TRACKERS, *names])
                warn(f"{argument} has {name!r}, and there is no tracker of that name.{hint}")
        return options
