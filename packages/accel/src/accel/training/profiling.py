"""Profiling a block with torch's profiler, one trace file per process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.process.control import wait

if TYPE_CHECKING:
    from accel_state.handlers import ProfileKwargs
    from accel_state.process.facts import Process

__all__ = ["profile"]


@contextlib.contextmanager
def profile(process: Process, handler: ProfileKwargs) -> Iterator[Any]:
    """Profile a block with torch's profiler.

    Args:
        process: This process, whose rank names the trace file.
        handler: The profiler's options; `output_trace_dir` makes every process write
            `profile_<rank>.json`, a Chrome trace.

    Yields:
        The running `torch.profiler.profile`.
    """
    with handler.build() as profiler:
        yield profiler
    if handler.output_trace_dir is not None:
        folder = Path(handler.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{process.rank}.json"))
        wait(process)  # until the traces of all are written
