"""Handling around torch's elastic agent: signal handlers, log lines, and the summary of a failure."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accel_launch.local.failures.record import Raised, read_record
from accel_launch.local.failures.summary import Failure, Report, failure_summary

HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""The signals that the agent handles."""

_LOGGERS = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")


@contextlib.contextmanager
def signal_handlers_kept() -> Iterator[dict[str, Any]]:
    """Put back at the end the signal handlers that the agent replaces and leaves behind.

    Yields:
        The handlers by the names of their signals.
    """
    found = {name: signal.getsignal(getattr(signal, name)) for name in HANDLED}
    handlers = {name: handler for name, handler in found.items() if handler is not None}
    try:
        yield handlers
    finally:
        set_handlers(handlers)


def set_handlers(handlers: Mapping[str, Any]) -> None:
    """Set signal handlers; nothing in another thread than the main one, where the agent sets none either.

    Args:
        handlers: The handlers by the names of their signals.
    """
    if threading.current_thread() is threading.main_thread():
        for name, handler in handlers.items():
            signal.signal(getattr(signal, name), handler)


def _drop(record: logging.LogRecord) -> bool:
    return False


@contextlib.contextmanager
def log_lines_dropped() -> Iterator[None]:
    """Drop the agent's log lines about workers that fail, which repeat the traceback line by line."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        # Filters, not levels: the user's level stays what it was.
        logger.addFilter(_drop)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_drop)


def elastic_summary(seen: Mapping[int, Any], folder: Path, size: int) -> str:
    """Return the summary of a run that failed.

    Args:
        seen: Torch's `ProcessFailure` of each rank that the agent saw fail; it looks at the first one alone.
        folder: The agent's folder of logs, in which each worker of this machine writes down its exception.
        size: Number of workers of the run.

    Returns:
        The text, as `accel launch` shows it.
    """
    # Any of them: on one machine global and local ranks differ by one number.
    rank, failure = next(iter(seen.items()))
    first_rank = rank - failure.local_rank  # of this machine
    raised = {first_rank + local: found for local, found in _records(folder).items()}
    failures = [
        Failure(rank, socket.gethostname(), failure.exitcode, failure.timestamp, "")
        for rank, failure in seen.items()
        if rank not in raised
    ]
    # What a worker wrote down says more than its exit code.
    failures += [
        Failure(rank, socket.gethostname(), 1, found.at, found.text) for rank, found in raised.items()
    ]
    return failure_summary(failures, Report("notebook_launcher", size))


def _records(folder: Path) -> dict[int, Raised]:
    """Return what the workers of the last attempt wrote down, by their local rank."""
    # torch makes attempt_0, attempt_1 ... for each restart; as numbers, as 10 comes after 9.
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.partition("_")[2]))
    files = attempts[-1].glob("*/error.json") if attempts else ()
    return {int(path.parent.name): found for path in files if (found := read_record(path)) is not None}
