"""How a plugin tells of settings that nothing reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.logging.warning import warn

__all__ = ["tell_ignored"]


def tell_ignored(plugin: Any, reasons: Mapping[str, str]) -> None:
    """Warn of each setting that is ignored, at the line that makes the plugin.

    Args:
        plugin: The plugin, a dataclass whose `__post_init__` calls the caller of this.
        reasons: Why, by the setting's name.
    """
    for name, reason in reasons.items():
        message = f"{type(plugin).__name__} ignores {name}={getattr(plugin, name)!r}: {reason}."
        warn(message)
