"""Warnings that point at the user's line, and come once in a run of many processes."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Literal

# What calls other code for the user: these packages, torch, and what `with`, decorators, enumerations,
# dataclasses and loggers put between.
_BETWEEN = frozenset(
    [
        "accel",
        "accel_ckpt",
        "accel_data",
        "accel_launch",
        "accel_ops",
        "accel_optim",
        "accel_state",
        "contextlib",
        "dataclasses",
        "enum",
        "functools",
        "logging",
        "torch",
    ]
)


def is_framework_frame(frame: FrameType) -> bool:
    """Return whether a frame is of code that calls other code for the user: accel, torch, `with`."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN


def user_frame() -> FrameType:
    """Return the innermost frame of the user's code."""
    frame: FrameType = sys._getframe(1)
    while is_framework_frame(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def warn(
    message: str,
    category: type[Warning] = UserWarning,
    *,
    about: Literal["run", "machine", "process"] = "run",
) -> None:
    """Warn at the user's line.

    Args:
        message: The text. One about a process says which.
        category: The kind of warning.
        about: What it is about, which decides who warns: the main process about a run, in which all do the
            same; the local main one about a machine; each process about itself.
    """
    rank, local_rank = _ranks()
    if {"run": rank, "machine": local_rank, "process": 0}[about] == 0:
        frame = user_frame()
        names = frame.f_globals
        warnings.warn_explicit(
            message,
            category,
            frame.f_code.co_filename,
            frame.f_lineno,
            names.get("__name__"),
            # Where `warnings.warn` looks too: one place warns once.
            names.setdefault("__warningregistry__", {}),
        )


def _ranks() -> tuple[int, int]:
    """Return this process's rank in the run and on its machine, also before there is a state."""
    # Here, as the environment's table is made of enumerations that warn.
    from accel_state.env import get_cpu_distributed_information

    # Not imported for a warning, as it imports torch.
    process = sys.modules.get("accel_state.process.state")
    held = process and process.PartialState._shared_state.get("process")
    if held:
        return held.rank, held.local_rank
    try:
        place = get_cpu_distributed_information()
    except ValueError:  # whoever needs the ranks says what is wrong with them
        return 0, 0
    return place.rank, place.local_rank
