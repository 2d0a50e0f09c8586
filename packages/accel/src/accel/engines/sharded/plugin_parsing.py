"""Parsing FSDP's settings: names in any case, numbers of old configurations."""

from __future__ import annotations

from typing import Any


def choice(field: str, value: Any, choices: dict[Any, Any]) -> Any:
    """Return the value of a name in any case; a value of `choices` is returned unchanged.

    Args:
        field: The setting, for the message.
        value: The name, or its number in `choices`, or a value.
        choices: Values by name.

    Raises:
        ValueError: If it is not among them.
    """
    # By identity: True equals 1, but is not a version.
    if any(value is item for item in choices.values()):
        return value
    name = value.upper() if isinstance(value, str) else value
    if isinstance(name, str) and name.isdigit():  # old configurations number the choices from 1
        number = int(name)
        name = (
            number if number in choices else list(choices)[number - 1] if 0 < number <= len(choices) else name
        )
    if isinstance(name, bool) or name not in choices:
        raise ValueError(f"{field} is {value!r}; allowed: {', '.join(str(item) for item in choices)}.")
    return choices[name]
