"""`accel launch` as a command for another machine, with the same flags."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from accel_launch.settings.resolve import Source
from accel_launch.settings.schema import SETTINGS

if TYPE_CHECKING:
    from accel_launch.plan.plan import LaunchPlan

# These act on this launcher alone; keys of an account are not passed on.
_LOCAL_ONLY = ("dry_run", "explain", "aws_access_key_id", "aws_secret_access_key")


def accel_launch_command(
    plan: LaunchPlan,
    *,
    without: Collection[str] = (),
    program: Sequence[str] = (sys.executable, "-m", "accel_launch"),
    sources: Collection[Source] = (Source.FLAG,),
) -> list[str]:
    """Return the command: flags, the script and its arguments.

    Args:
        plan: The plan of this launcher.
        without: Settings whose flags are left out.
        program: The command for `accel`; this Python's by default.
        sources: Where the settings come from that become flags; the others are read there as they were here.
    """
    command = [*program, "launch"]
    for setting in SETTINGS.values():
        found = plan.settings[setting.name]
        if found.source in sources and setting.name not in (*_LOCAL_ONLY, *without):
            values = found.value if setting.repeated else [found.value]
            # With "=", so that a value that begins with a dash is not taken for a flag.
            command += [f"{setting.flag}={_text(value)}" for value in values]
    return [*command, plan.script, *plan.arguments]


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
