"""Tracebacks of uncaught exceptions through rich, where the environment requests them.

Standard library and rich only.
"""

from __future__ import annotations

from accel_state import env
from accel_state.imports.available import is_rich_available
from accel_state.logging.warning import warn


def set_tracebacks() -> None:
    """Let rich write the tracebacks of uncaught exceptions, if ACCELERATE_ENABLE_RICH says so.

    ACCELERATE_DISABLE_RICH, which older programs set, comes before it. Where rich is not installed, a warning
    says so and tracebacks stay as they are.
    """
    # Off by default: rich's tracebacks of many processes are hard to distinguish in one log.
    if not env.get("ACCELERATE_ENABLE_RICH"):
        return
    if env.get("ACCELERATE_DISABLE_RICH"):
        warn(
            "ACCELERATE_ENABLE_RICH is ignored, as ACCELERATE_DISABLE_RICH is set too: unset that one. Rich "
            "is off where neither is set.",
        )
    elif not is_rich_available():
        warn(
            "ACCELERATE_ENABLE_RICH is ignored, as rich is not installed: `pip install rich`, or unset the "
            "variable.",
        )
    else:
        from rich.traceback import install

        install()
