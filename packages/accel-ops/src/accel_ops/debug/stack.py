"""Where a thread is: the user's line, and the operation that it called there."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from accel_state.logging.warning import is_framework_frame

_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<frozen"}
)
_INSTALLED = ("site-packages", "dist-packages")
# In the code of these files a thread waits for other processes: two of torch, two of accel that use the
# store, and one that waits for collectives.
_WAITING = {
    str(dist.distributed_c10d.__file__),
    # Only its path: importing it would cost every program, and few call it.
    str(Path(dist.__file__).with_name("_functional_collectives.py")),
    str(Path(__file__).with_name("store.py")),
    str(Path(__file__).parents[1] / "collectives/store_barrier.py"),
    str(Path(__file__).parents[1] / "collectives/waits.py"),
}
# Functions between a call and the operation that was called: decorators, and those of debug mode.
_DECORATORS = {"wrapper", "inner", "decorate_context", "check", "exchange"}
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True)
class Site:
    """Where a thread is.

    Attributes:
        place: The user's line, as "file:line in function".
        operation: The function that the user's line called, and the collective in it: "wait_for_everyone
            (barrier)"; empty in code without communication.
        waits: Whether it is inside a function that waits for other processes.
        instruction: Compared with a previous one, shows whether the thread has moved.
    """

    place: str
    operation: str
    waits: bool
    instruction: tuple[int, int]


def find_site(thread_id: int) -> Site:
    """Find where a thread is.

    Args:
        thread_id: Its `threading.get_ident()`.
    """
    # CPython's only way to see what another thread does.
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return Site(_ended(), "", False, (0, 0))
    stack: list[FrameType] = []
    outer: FrameType | None = frame
    while outer is not None:
        stack.append(outer)
        outer = outer.f_back
    # An installed script is user code, not a library.
    line = next((n for n, f in enumerate(stack) if not _is_library(f)), None)
    if line is None:
        line = next(
            (n for n, f in enumerate(stack) if not _is_standard(f) and not is_framework_frame(f)), None
        )
    if line is None:  # only the interpreter, which is shutting down
        return Site(_ended(), "", False, (id(frame), frame.f_lasti))
    operation, waits = _operation(stack[:line])
    return Site(_place(stack[line]), operation, waits, (id(frame), frame.f_lasti))


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARIES) or is_framework_frame(frame)


def _is_standard(frame: FrameType) -> bool:
    """Return whether a frame is of the standard library, below whose folder other packages are installed."""
    name = frame.f_code.co_filename
    return name.startswith(_LIBRARIES) and not any(folder in name for folder in _INSTALLED)


def _operation(stack: list[FrameType]) -> tuple[str, bool]:
    """Name the operation of the frames below the user's line, and whether it waits."""
    collective, waits = "", False
    for frame in stack:  # from the innermost to the outermost
        code = frame.f_code
        if code.co_filename in _WAITING:
            waits = True
            if _is_name(code.co_name) and not code.co_filename.endswith("store.py"):
                collective = code.co_name
    if not waits and all(frame.f_code.co_name != _BACKWARD for frame in stack):
        return "", False
    names = (frame.f_code.co_name for frame in reversed(stack) if not _is_standard(frame))
    called = next(filter(_is_name, names), "")
    both = f"{called} ({collective})" if collective not in ("", called) else called
    return both or "a collective", waits


def _is_name(name: str) -> bool:
    return not name.startswith(("_", "<")) and name not in _DECORATORS


def describe_location(thread_id: int) -> str:
    """Describe where a thread is now.

    Args:
        thread_id: Its `threading.get_ident()`.

    Returns:
        File, line and function of the innermost frame, and of the innermost one outside libraries.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "no line of Python: its thread has ended"
    here = _place(frame)
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith(_LIBRARIES):
        outer = outer.f_back
    return here if outer is None or outer is frame else f"{here}, called from {_place(outer)}"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _ended() -> str:
    # Non-daemon threads may keep a process alive whose main thread has failed.
    return f"the end of its script, because {why_exiting()}"


def why_exiting() -> str:
    """Return the exception that ends the script, or that it ended, as the end of a sentence."""
    # last_value is the uncaught exception; a worker of multiprocessing ends while it handles one.
    error: Any = getattr(sys, "last_value", None) or sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = error.__context__  # torch's launchers exit like this after the function's exception
    if not error:
        return "its script ended"
    return f"of {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def failed_in_collective() -> bool:
    """Return whether the script ends by an error of a collective, such as the loss of another process."""
    error = getattr(sys, "last_value", None)
    codes = [frame.f_code for frame, _ in _failing_frames()]
    waited = any(code.co_filename in _WAITING or code.co_name == _BACKWARD for code in codes)
    return isinstance(error, RuntimeError) and waited


def failure_place() -> str:
    """Return the user's line at which the script failed, as "file:line in function"; empty if it did not."""
    lines = [(frame, line) for frame, line in _failing_frames() if not _is_library(frame)]
    if not lines:
        return ""
    frame, line = lines[-1]
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"


def _failing_frames() -> list[tuple[FrameType, int]]:
    error = getattr(sys, "last_value", None)
    return list(traceback.walk_tb(error.__traceback__)) if error is not None else []
