"""Experiment tracking: which trackers there are, and which of them can start."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from importlib.util import find_spec

from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.tensorboard import TensorBoardTracker
from accel_state.enums import LoggerType
from accel_state.imports.packages import install_hint
from accel_state.logging.warning import warn

__all__ = [
    "GeneralTracker",
    "TensorBoardTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
    "tracker_class",
]


# By name: the class, whose library is imported when it starts, and the module that the library installs.
_TRACKERS: dict[str, tuple[type[GeneralTracker], str]] = {
    "tensorboard": (TensorBoardTracker, "tensorboard"),
}
_REGISTERED: dict[str, type[GeneralTracker]] = {}  # by register_tracker_class


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make a tracker of your own available by its name in `log_with`.

    Raises:
        TypeError: If it is not a subclass of GeneralTracker.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise TypeError(
            f"register_tracker_class got {tracker_class!r}; it takes a subclass of GeneralTracker."
        )
    _REGISTERED[tracker_class.name] = tracker_class


def get_available_trackers() -> list[str]:
    """The names of the trackers whose library is installed, and of the registered ones."""
    installed = [name for name, (_, library) in _TRACKERS.items() if find_spec(library) is not None]
    return installed + list(_REGISTERED)


def filter_trackers(
    log_with: str | LoggerType | GeneralTracker | Sequence[str | LoggerType | GeneralTracker] | None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[str | GeneralTracker]:
    """The trackers of `log_with` that can start: known names whose library is installed, and tracker objects.

    Args:
        log_with: One or several names, `LoggerType`s or trackers; "all" stands for every one installed.
        logging_dir: Where trackers write.

    Raises:
        ValueError: If a name is unknown, or a tracker needs a `logging_dir` and there is none.
        NotImplementedError: If a name is documented and not built yet.
    """
    if log_with is None:
        return []
    wanted = list(log_with) if isinstance(log_with, list | tuple) else [log_with]
    if any(str(getattr(item, "value", item)) == "all" for item in wanted):
        objects = [item for item in wanted if isinstance(item, GeneralTracker)]  # "all" covers names alone
        wanted = [*objects, *get_available_trackers()]
    chosen: list[str | GeneralTracker] = []
    for item in wanted:
        if isinstance(item, GeneralTracker):
            chosen.append(item)
            continue
        name = str(getattr(item, "value", item)).lower()
        _check_known(name)
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
    if name in _REGISTERED:
        return _REGISTERED[name]
    return _TRACKERS[name][0]


def _check_known(name: str) -> None:
    if name in _TRACKERS or name in _REGISTERED:
        return
    if name in LoggerType.list():
        raise NotImplementedError(f"the {name} tracker is not there yet; there are: {', '.join(_TRACKERS)}.")
    known = [*LoggerType.list(), *_REGISTERED]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"log_with got {name!r}; it takes {', '.join(known)}, or a GeneralTracker.{hint}")


def _check_logging_dir(name: str, logging_dir: str | os.PathLike[str] | None) -> None:
    if logging_dir is None and tracker_class(name).requires_logging_directory:
        raise ValueError(
            f"the {name} tracker needs a folder: pass project_dir to Accelerator, or a logging_dir in "
            "its project_config."
        )
