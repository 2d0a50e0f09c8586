"""Loggers for runs of several processes: by default only the main one logs."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel_state import env

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo

    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # Python 3.10 cannot subscript it

_COUNTS_LOGGING_FRAMES = sys.version_info < (3, 11)  # whether a stacklevel counts the frames of logging too


class MultiProcessAdapter(_Adapter):
    """A logger for code that runs in many processes at once.

    Every logging method takes two more keyword arguments:
        main_process_only: Log on the main process alone; True by default.
        in_order: Every process logs, one after the other in rank order. All processes must make the call,
            and wait for each other, whatever their log levels. Has no effect with an explicit
            `main_process_only=True`.

    A `stacklevel` counts from the call, as in `logging`. Where another adapter with its own methods
    wraps this one, records name the line that called the other one, whatever `stacklevel` it passes.

    Args:
        logger: The logger to write to.
        extra: Fields for all records, as in `logging.LoggerAdapter`.
    """

    def __init__(self, logger: logging.Logger, extra: dict[str, object] | None = None) -> None:
        super().__init__(logger, extra)
        self._warned: set[str] = set()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message on the selected processes.

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
        # Popped in any case: logging accepts neither of them.
        in_order = kwargs.pop("in_order", False) and not main_only
        if in_order:
            self._log_in_order(process, level, msg, *args, **kwargs)
        elif main_only is False or process.is_main:
            self._emit(level, msg, *args, **kwargs)

    def _log_in_order(
        self, process: ProcessInfo, level: int, msg: object, *args: object, **kwargs: Any
    ) -> None:
        from accel_state.process.state import wait_for_everyone

        # The same number of barriers on every process, before and after its turn.
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
            # logging counts frames from its own call, below those of this class.
            kwargs["stacklevel"] = self._stacklevel(kwargs.get("stacklevel", 1))
            msg, processed = self.process(msg, kwargs)
            self.logger.log(level, msg, *args, **processed)

    def _stacklevel(self, stacklevel: int) -> int:
        """Return the stacklevel with which a logger, called by this's caller, names the user's line."""
        frame: FrameType | None = sys._getframe(1)
        level, wrapped = 0, False
        while frame is not None:
            module = frame.f_globals.get("__name__")
            level += module != "logging" or _COUNTS_LOGGING_FRAMES
            if module not in ("logging", __name__):
                logger = frame.f_locals.get("self")
                if isinstance(logger, logging.LoggerAdapter) and logger is not self:
                    wrapped = True
                else:
                    stacklevel -= 1
                    if stacklevel < 1 or wrapped:
                        break
            frame = frame.f_back
        return level

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
        # By text: arguments need not be hashable.
        key = repr((args, sorted(kwargs.items())))
        if key not in self._warned:
            self.log(logging.WARNING, *args, **kwargs)
            # After logging: a handler's error must not silence the next attempt.
            self._warned.add(key)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that logs on the main process only, unless a call says otherwise.

    Example:
        >>> logger = get_logger(__name__, log_level="INFO")
        >>> logger.info("once per run")
        >>> logger.info("once per process", main_process_only=False)
        >>> logger.info("once per process, by rank", in_order=True)

    Args:
        name: The logger's name, such as `__name__`.
        log_level: Its level, such as "INFO"; by default that of ACCELERATE_LOG_LEVEL, else `logging`'s.

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


def _process() -> ProcessInfo:
    from accel_state.process.state import PartialState, current_process

    # Not created here: a logger must not decide how a run is set up.
    if not PartialState._shared_state:
        raise RuntimeError(
            "This logger needs the process state: initialise PartialState() or Accelerator() "
            "before logging with it."
        )
    return current_process()
