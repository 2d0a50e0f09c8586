"""Loggers that know of the other processes: by default only the main one speaks."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from accel_state import env

if TYPE_CHECKING:
    from accel_state.process import Process

    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # Python 3.10 cannot subscript it

__all__ = ["MultiProcessAdapter", "get_logger"]


class MultiProcessAdapter(_Adapter):
    """A logger for code that runs in many processes at once.

    Every logging method takes two more keyword arguments:
        main_process_only: Log on the main process alone; True by default.
        in_order: Every process logs, one after the other in order of rank. All processes must make the
            call, and wait for each other, whatever their log levels. Has no effect beside an explicit
            `main_process_only=True`.

    Args:
        logger: The logger to write to.
        extra: Fields for all records, as in `logging.LoggerAdapter`.
    """

    def __init__(self, logger: logging.Logger, extra: dict[str, object] | None = None) -> None:
        super().__init__(logger, extra)
        self._warned: set[str] = set()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message on the processes that should.

        Args:
            level: Level of the message.
            msg: The message, with `%` places for the arguments.
            *args: The arguments.
            **kwargs: `main_process_only` and `in_order` (see the class), and those of `logging.Logger.log`.

        Raises:
            RuntimeError: If the process state has not been initialised.
        """
        process = _process()
        main_only = kwargs.pop("main_process_only", None)
        in_order = kwargs.pop("in_order", False) and not main_only
        if in_order:
            self._log_in_order(process, level, msg, *args, **kwargs)
        elif main_only is False or process.is_main:
            self._emit(level, msg, *args, **kwargs)

    def _log_in_order(self, process: Process, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        from accel_state.process import wait_for_everyone

        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        for _ in range(process.rank):
            wait_for_everyone()
        try:
            self._emit(level, msg, *args, **kwargs)
        finally:
            # A handler that fails on one rank must not leave the others waiting.
            for _ in range(process.rank, process.world_size):
                wait_for_everyone()

    def _emit(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            # Two frames, log and this one, are between the caller and the logger.
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 2
            msg, processed = self.process(msg, kwargs)
            self.logger.log(level, msg, *args, **processed)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the adapter's extra fields to those of the call.

        Args:
            msg: The message.
            kwargs: The call's keyword arguments.

        Returns:
            Both, with the fields merged; those of the call win.
        """
        if self.extra:
            kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        return msg, kwargs

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning, and nothing when called again with equal arguments.

        Args:
            *args: As for `warning`.
            **kwargs: As for `warning`.
        """
        key = repr((args, sorted(kwargs.items())))
        if key not in self._warned:
            self.log(logging.WARNING, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})
            self._warned.add(key)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that speaks on the main process only, unless a call says otherwise.

    Example:
        >>> logger = get_logger(__name__, log_level="INFO")
        >>> logger.info("once per run")
        >>> logger.info("once per process", main_process_only=False)
        >>> logger.info("once per process, by rank", in_order=True)

    Args:
        name: The logger's name, such as `__name__`.
        log_level: Its level, such as "INFO"; by default that of ACCELERATE_LOG_LEVEL, else what `logging`
            says.

    Returns:
        The logger. It may be made at import; logging needs a PartialState or Accelerator.

    Raises:
        ValueError: If the level is unknown.
    """
    logger = logging.getLogger(name)
    level = log_level if log_level is not None else env.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        _set_level(logger, level)
    return MultiProcessAdapter(logger)


def _set_level(logger: logging.Logger, level: str) -> None:
    try:
        logger.setLevel(level.upper())
    except ValueError:
        raise ValueError(
            f"{level!r} is not a log level; use DEBUG, INFO, WARNING, ERROR or CRITICAL, as log_level or in "
            "ACCELERATE_LOG_LEVEL."
        ) from None


def _process() -> Process:
    from accel_state.process import PartialState, current_process

    if not PartialState._shared_state:
        raise RuntimeError(
            "This logger needs to know which process it is in: initialise PartialState() or Accelerator() "
            "before logging with it."
        )
    return current_process()
