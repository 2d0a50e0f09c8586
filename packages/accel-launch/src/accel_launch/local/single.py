"""One process: the script replaces the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from accel_launch.plan.plan import LauncherCommand

if TYPE_CHECKING:
    from accel_launch.plan.plan import LaunchPlan


def prepare(plan: LaunchPlan, base: Mapping[str, str]) -> LauncherCommand:
    """Return the script's own command.

    Args:
        plan: What to start.
        base: This process's environment.
    """
    return LauncherCommand(plan.command, plan.environ, "one process, in place of this one")
