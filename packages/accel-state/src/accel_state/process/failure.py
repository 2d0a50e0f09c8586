"""Record the exception that ends this process, and its time, for the launcher.

A launcher names a file in TORCHELASTIC_ERROR_FILE: `accel launch` and torchrun do, which compare the times to
find the first failure among those that it caused. The format is torch's.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from types import TracebackType

from accel_state import env

_path: str | None = None  # of the file that a launcher requested


def record_uncaught() -> None:
    """From now on, write an uncaught exception to the file that a launcher requested, if any.

    The file's modification time is the time of the exception; the previous `sys.excepthook` still runs. The
    variable is removed, so that child processes do not write their own failures to the file. In a process of
    `multiprocessing` nothing is done: nothing calls the hook there, and torch's agent reads the variable
    after the function that it runs.
    """
    global _path
    path = env.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    # Here, as most processes have no such variable.
    from multiprocessing import parent_process

    if parent_process() is not None:
        return
    env.set("TORCHELASTIC_ERROR_FILE", None)
    _path = path
    # Forks inherit the hook.
    pid, before = os.getpid(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid:  # else a fork, whose failure is not the worker's
            record(error)
        before(kind, error, trace)

    sys.excepthook = hook


def record(error: BaseException) -> None:
    """Write why this process is about to end, if a launcher requested it and nothing has been written yet.

    Args:
        error: The reason.
    """
    if _path is None:
        return
    now = time.time_ns()
    text = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(now // 10**9),
        },
    }
    # An existing file, such as that of torch's decorator `record`, was written closer to the exception.
    with contextlib.suppress(OSError), open(_path, "x", encoding="utf-8") as file:
        json.dump({"message": text}, file)
        file.flush()
        os.utime(_path, ns=(now, now))
