"""Errors of the launcher.

LaunchError(ValueError)
    ConfigError
NotAvailableError(LaunchError, NotImplementedError)
"""

from __future__ import annotations


class LaunchError(ValueError):
    """The command cannot be started; nothing has been started."""


class ConfigError(LaunchError):
    """A config file cannot be read, or holds an unknown key or a value that is not allowed."""


class NotAvailableError(LaunchError, NotImplementedError):
    """A documented feature that this version does not have yet."""
