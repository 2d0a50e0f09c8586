"""Warnings that point at the user's line, and appear once in a distributed run."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Literal

# Packages whose frames are skipped: these packages, torch, and the modules behind `with`, decorators,
# enumerations, dataclasses and loggers.
_FRAMEWORK_PACKAGES = frozenset(
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
    """Return whether a frame belongs to a framework (accel, torch) or to Python's own plumbing (`with`)."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in _FRAMEWORK_PACKAGES


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
        message: The text. If it is about a process, it names the process.
        category: The kind of warning.
        about: What it is about, which decides which process warns: the main process about a run, the local
            main process about a machine, each process about itself.
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
            # The registry of `warnings.warn`: each line warns once.
            names.setdefault("__warningregistry__", {}),
        )


def _ranks() -> tuple[int, int]:
    """Return this process's rank in the run and on its machine, even before there is a state."""
    # Here, as the environment's table uses enumerations that warn.
    from accel_state.env import get_cpu_distributed_information

    # Not imported for a warning, as it imports torch.
    process = sys.modules.get("accel_state.process.state")
    process_info = process and process.PartialState._shared_state.get("process")
    if process_info:
        return process_info.rank, process_info.local_rank
    try:
        ranks = get_cpu_distributed_information()
    except ValueError:  # the code that needs the ranks reports the error
        return 0, 0
    return ranks.rank, ranks.local_rank
