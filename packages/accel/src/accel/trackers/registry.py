"""Which trackers there are, and which of them can start. Built-in ones are imported on first use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from accel.trackers.base import GeneralTracker
from accel_state.enums import LoggerType
from accel_state.imports.packages import install_hint, is_package_available
from accel_state.logging.suggestion import did_you_mean
from accel_state.logging.warning import warn


@dataclass(frozen=True)
class TrackerRow:
    """Where a tracker lives, and the library that it needs. The extra that installs it has its name.

    Attributes:
        path: "module:class".
        library: Import name; None if it needs none.
    """

    path: str
    library: str | None


TRACKERS: dict[str, TrackerRow] = {
    "aim": TrackerRow("accel.trackers.systems.aim:AimTracker", "aim"),
    "clearml": TrackerRow("accel.trackers.systems.clearml:ClearMLTracker", "clearml"),
    "comet_ml": TrackerRow("accel.trackers.systems.comet:CometMLTracker", "comet_ml"),
    "dvclive": TrackerRow("accel.trackers.systems.dvclive:DVCLiveTracker", "dvclive"),
    "jsonl": TrackerRow("accel.trackers.systems.jsonl:JSONLTracker", None),
    "mlflow": TrackerRow("accel.trackers.systems.mlflow:MLflowTracker", "mlflow"),
    "swanlab": TrackerRow("accel.trackers.systems.swanlab:SwanLabTracker", "swanlab"),
    "tensorboard": TrackerRow("accel.trackers.systems.tensorboard:TensorBoardTracker", "tensorboard"),
    "trackio": TrackerRow("accel.trackers.systems.trackio:TrackioTracker", "trackio"),
    "wandb": TrackerRow("accel.trackers.systems.wandb:WandBTracker", "wandb"),
}
REGISTERED: dict[str, type[GeneralTracker]] = {}
"""What `register_tracker_class` got, by name."""


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make your tracker class available by its name in `log_with`.

    Args:
        tracker_class: The class; `init_trackers` makes it with the project's name as its first argument. One
            whose name is taken replaces the other, with a warning.

    Raises:
        TypeError: If it is not a subclass of GeneralTracker.
        ValueError: If it has no name.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise TypeError(
            f"register_tracker_class got {tracker_class!r}; it takes a subclass of GeneralTracker."
        )
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"register_tracker_class got {tracker_class.__name__}, whose `name` is {name!r}: give the class "
            "a `name`, by which log_with finds it."
        )
    # The same class twice is not a mistake: its module may be run again.
    if has_tracker(name) and REGISTERED.get(name) is not tracker_class:
        warn(f"There is a tracker {name!r} already: {tracker_class.__name__} takes its place in log_with.")
    REGISTERED[name] = tracker_class


def get_available_trackers() -> list[str]:
    """The names of the trackers whose library is installed, and of the registered ones."""
    installed = [
        name for name, row in TRACKERS.items() if row.library is None or is_package_available(row.library)
    ]
    # Each once, as a registered class may take the place of a built-in one.
    return list(dict.fromkeys([*installed, *REGISTERED]))


def filter_trackers(
    log_with: str | LoggerType | GeneralTracker | Sequence[str | LoggerType | GeneralTracker] | None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[str | GeneralTracker]:
    """The trackers of `log_with` that can start: known names whose library is installed, and tracker objects.

    Args:
        log_with: One or several names, `LoggerType`s or trackers; "all" stands for every one installed, and
            leaves out those that need a folder if there is none.
        logging_dir: Where trackers write.

    Raises:
        ValueError: If a name is unknown, a tracker needs a `logging_dir` and there is none, or a class is
            given in the place of its object.
    """
    if log_with is None:
        return []
    wanted = list(log_with) if isinstance(log_with, list | tuple) else [log_with]
    # `value`: a LoggerType stands for a name.
    if any(str(getattr(item, "value", item)) == "all" for item in wanted):
        objects = [item for item in wanted if isinstance(item, GeneralTracker)]  # "all" covers names alone
        wanted = [*objects, *_startable_trackers(logging_dir)]
    chosen: list[str | GeneralTracker] = []
    for item in wanted:
        if isinstance(item, GeneralTracker):
            chosen.append(item)
            continue
        if isinstance(item, type) and issubclass(item, GeneralTracker):
            raise ValueError(
                f"log_with got the class {item.__name__}: make an object of it, {item.__name__}(...), or "
                "pass it to register_tracker_class, and its name to log_with."
            )
        name = str(getattr(item, "value", item))
        # Built-in names in any case; those that are registered as their classes have them.
        name = name if has_tracker(name) else name.lower()
        _check_name(name)
        if name not in get_available_trackers():
            warn(
                f"log_with asks for {name!r}, whose library is not installed: nothing is logged there. "
                f"Install it with: {install_hint(name)}",
            )
        elif name not in chosen:
            _check_logging_dir(name, logging_dir)
            chosen.append(name)
    return chosen


def tracker_class(name: str) -> type[GeneralTracker]:
    """The class of a known tracker."""
    if name in REGISTERED:
        return REGISTERED[name]
    module, _, attribute = TRACKERS[name].path.partition(":")
    found: type[GeneralTracker] = getattr(import_module(module), attribute)
    return found


def has_tracker(name: str) -> bool:
    """Whether a tracker of this name is built in or registered."""
    return name in TRACKERS or name in REGISTERED


def _startable_trackers(logging_dir: str | os.PathLike[str] | None) -> list[str]:
    names = get_available_trackers()
    without = [] if logging_dir else [n for n in names if tracker_class(n).requires_logging_directory]
    if without:
        warn(
            f"log_with='all' leaves out {', '.join(without)}, which need a folder: pass project_dir to "
            "Accelerator, or a logging_dir in its project_config."
        )
    return [name for name in names if name not in without]


def _check_name(name: str) -> None:
    if has_tracker(name):
        return
    names = [*TRACKERS, *(item for item in REGISTERED if item not in TRACKERS)]
    hint = did_you_mean(name, names)
    raise ValueError(f"log_with got {name!r}; it takes all, {', '.join(names)}, or a GeneralTracker.{hint}")


def _check_logging_dir(name: str, logging_dir: str | os.PathLike[str] | None) -> None:
    if logging_dir is None and tracker_class(name).requires_logging_directory:
        raise ValueError(
            f"the {name} tracker needs a folder: pass project_dir to Accelerator, or a logging_dir in "
            "its project_config."
        )
