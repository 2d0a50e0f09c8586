"""The trackers of one run: starting them, finding one, and logging to all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from accel.trackers.base import GeneralTracker
from accel.trackers.registry import tracker_class
from accel_state.process.facts import Process

__all__ = ["find", "log", "start"]


def start(
    log_with: Sequence[str | GeneralTracker],
    process: Process,
    project_name: str,
    logging_dir: str | os.PathLike[str] | None,
    config: dict[str, Any] | None = None,
    init_kwargs: dict[str, Any] | None = None,
) -> list[GeneralTracker]:
    """Make and start the trackers of `log_with`, and store `config` with each.

    Args:
        log_with: What `filter_trackers` returned.
        process: This process; trackers that log on the main process alone are made there alone.
        project_name: The run's or project's name.
        logging_dir: Where trackers write.
        config: The run's configuration.
        init_kwargs: Further constructor arguments, by tracker name.
    """
    trackers: list[GeneralTracker] = []
    for item in log_with:
        kind = type(item) if isinstance(item, GeneralTracker) else tracker_class(item)
        if kind.main_process_only and not process.is_main:
            continue
        if isinstance(item, GeneralTracker):
            tracker = item
        else:
            options = dict((init_kwargs or {}).get(item, {}))
            if kind.requires_logging_directory:
                options["logging_dir"] = logging_dir
            make: Any = kind
            tracker = make(project_name, **options)
        tracker.start()
        trackers.append(tracker)
    if config is not None:
        for tracker in trackers:
            tracker.store_init_configuration(config)
    return trackers


def find(trackers: Sequence[GeneralTracker], process: Process, name: str, unwrap: bool) -> Any:
    """The tracker called `name`; a blank one on the processes that do not log.

    Raises:
        ValueError: If no such tracker was started.
    """
    for tracker in trackers:
        if tracker.name == name:
            return tracker.tracker if unwrap else tracker
    if not process.is_main:
        return GeneralTracker(_blank=True)
    started = [tracker.name for tracker in trackers]
    raise ValueError(
        f"there is no tracker {name!r}; started are {started}. Name it in log_with, then init_trackers()."
    )


def log(
    trackers: Sequence[GeneralTracker],
    values: dict[str, Any],
    step: int | None,
    log_kwargs: dict[str, Any] | None,
) -> None:
    """Log `values` to each tracker, with the further arguments that `log_kwargs` holds under its name."""
    for tracker in trackers:
        tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))
