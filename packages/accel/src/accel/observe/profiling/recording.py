"""Profiling a block with torch's profiler: one trace file per process, and a summary over all processes."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel.observe.profiling.summary import OperatorTotals, print_summary
from accel_state.logging.warning import warn
from accel_state.verify import output_path

if TYPE_CHECKING:
    from accel_state.handlers import ProfileKwargs
    from accel_state.process.info import ProcessInfo

_is_running = False  # torch's own flag is off while a schedule waits


@contextlib.contextmanager
def profile(process: ProcessInfo, handler: ProfileKwargs) -> Iterator[torch.profiler.profile]:
    """Profile a block with torch's profiler.

    Processes do not wait for each other, so that one alone can profile, or leave the block by an exception;
    what was recorded until then is written and counted.

    Args:
        process: This process, whose rank names the trace files.
        handler: The profiler's options. With `output_trace_dir` every process writes each recording as a
            Chrome trace: `profile_<rank>.json`, then `profile_<rank>_2.json` and so on where a schedule makes
            several. With `summary` the main process prints a table at the end.

    Yields:
        The running `torch.profiler.profile`.

    Raises:
        OSError: If the folder cannot be written to.
        RuntimeError: If a profiler is running already.
    """
    global _is_running
    if _is_running or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        raise RuntimeError(
            "accelerator.profile() cannot start: a profiler is running in this process, and torch has room "
            "for one. End that one first, or profile the outer block alone."
        )
    if handler.output_trace_dir is not None:
        folder = output_path(handler.output_trace_dir)
        handler = dataclasses.replace(handler, output_trace_dir=folder)
        _check_folder(Path(folder))
    recordings = _Recordings(process, handler)
    profiler = dataclasses.replace(handler, on_trace_ready=recordings.add).build()
    _is_running = True
    failed = True
    try:
        with profiler:
            yield profiler
        failed = False
    finally:
        _is_running = False
        if handler.summary is not None:
            print_summary(recordings.totals, handler.summary, process, failed)
    if recordings.count == 0:
        warn(
            f"accelerator.profile() recorded nothing: the block ended after {profiler.step_num} calls of "
            f"step(), before the first recording of schedule_option={handler.schedule_option!r} began. Call "
            "profiler.step() at the end of each training step, or make skip_first, wait and warmup shorter."
        )


class _Recordings:
    """Takes each recording of a profiler when it is complete.

    Args:
        process: This process.
        handler: The profiler's options.
    """

    def __init__(self, process: ProcessInfo, handler: ProfileKwargs) -> None:
        self._rank = process.rank
        self._handler = handler
        self.count = 0
        self.totals = OperatorTotals()

    def add(self, profiler: Any) -> None:
        """Write the trace, count its operators, and hand it on to the user's function.

        Args:
            profiler: The profiler, whose recording is complete.
        """
        self.count += 1
        try:
            self._take(profiler)
        except BaseException:
            # It has stopped, and would stop again when the block is left: torch 2.13 crashes then.
            profiler.current_action = torch.profiler.ProfilerAction.NONE
            raise

    def _take(self, profiler: Any) -> None:
        if self._handler.output_trace_dir is not None:
            number = "" if self.count == 1 else f"_{self.count}"
            path = Path(self._handler.output_trace_dir) / f"profile_{self._rank}{number}.json"
            vars(profiler).pop("export_chrome_trace", None)
            path.unlink(missing_ok=True)
            profiler.export_chrome_trace(str(path))
            _check_complete(path)
            # torch exports a recording once, and raises the second time: on_trace_ready, or the script
            # after the block, gets a copy.
            profiler.export_chrome_trace = partial(_copy, path)
        if self._handler.summary is not None:
            self.totals.add(profiler.key_averages())
        if self._handler.on_trace_ready is not None:
            self._handler.on_trace_ready(profiler)


def _check_folder(folder: Path) -> None:
    # Before the block, whose recording would be lost.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"ProfileKwargs(output_trace_dir={str(folder)!r}): cannot write traces there ({error}). Name a "
            "folder that this process can write to."
        ) from error


def _check_complete(path: Path) -> None:
    # torch prints an error and continues if it cannot write.
    is_complete = False
    if path.is_file():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16))
            is_complete = file.read().rstrip().endswith(b"}")
    if not is_complete:
        raise OSError(f"The trace {path} could not be written as a whole: is the disk full?")


def _copy(written: Path, path: str, *_: Any, **__: Any) -> None:
    if str(path).endswith(".gz"):
        with written.open("rb") as source, gzip.open(path, "wb") as target:
            shutil.copyfileobj(source, target)
    else:
        shutil.copyfile(written, path)
