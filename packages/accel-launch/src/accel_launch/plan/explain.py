"""Text of `--explain` and `--dry_run`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from accel_launch.plan.plan import LauncherCommand
from accel_launch.settings.redact import redact_command, redact_values
from accel_launch.settings.resolve import Settings
from accel_launch.settings.schema import GROUPS, SETTINGS


def explain_text(settings: Settings) -> str:
    """Return every effective setting with its value and where it came from, by group.

    Settings of groups that are not switched on are left out unless they were set.

    Args:
        settings: The effective settings.
    """
    rows: list[tuple[str, str, str]] = []
    for key, group in GROUPS.items():
        shown = [
            setting
            for setting in SETTINGS.values()
            if setting.group == key and (settings.is_set(setting.name) or settings.active(setting))
        ]
        if shown:
            rows.append(("", f"{group.title}:", ""))
        for setting in shown:
            found = settings[setting.name]
            value = _text(redact_values(found.value, setting.name))
            note = "" if settings.active(setting) else f" (not in use: needs {group.remedy})"
            rows.append((f"  {setting.name}", value, found.detail + note))
    name_width = max(len(name) for name, _, _ in rows) + 2
    # 32: a long value, such as a path, moves its own source and not the column.
    value_width = min(max(len(value) for name, value, _ in rows if name), 32) + 2
    return "\n".join(
        f"{name:{name_width}}{value:{value_width}}{source}".rstrip() if name else value
        for name, value, source in rows
    )


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "-"
    return str(value) or "-"


def dry_run_text(prepared: LauncherCommand, base: Mapping[str, str]) -> str:
    """Return the command, and the environment where it differs from this process's, without secrets.

    Args:
        prepared: What would be started.
        base: The environment of this process.
    """
    environ = prepared.environ
    lines = [f"# {prepared.note}"]
    # All of it can be pasted into a shell.
    lines += [f"unset {name}" for name in sorted(base) if name not in environ]
    lines += [
        f"export {name}={shlex.quote(redact_values(text, name))}"
        for name, text in sorted(environ.items())
        if base.get(name) != text
    ]
    return "\n".join([*lines, shlex.join(redact_command(prepared.command))])
