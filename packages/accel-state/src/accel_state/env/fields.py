"""Fields of dataclasses that take their default from the environment.

@dataclass
class Settings:
size: int | None = from_env("SIZE")

def __post_init__(self) -> None:
user_set = read_environment(self)  # an argument wins over the variable, and that over its default
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from accel_state import env


def from_env(variable: str, when: Callable[[Any], bool] | None = None) -> Any:
    """Declare a field that is None by default, and which `read_environment` then reads from a variable.

    Args:
        variable: A name of `env.VARIABLES`.
        when: Called with the settings, in which all fields before this one are filled; False leaves the field
            at None. By default the variable is always read.
    """
    return dataclasses.field(default=None, metadata={"variable": variable, "when": when})


def read_environment(settings: Any, *, defaults: bool = True) -> set[str]:
    """Fill every field that is None from its variable.

    Args:
        settings: An instance of a dataclass with fields made by `from_env`.
        defaults: Whether the variable's default counts too, where it is unset.

    Returns:
        The names of the fields that were not None: those that the user has set, or that have another default.

    Raises:
        ValueError: If a variable's text is not valid.
    """
    user_set = set()
    for field in dataclasses.fields(settings):
        variable, when = field.metadata.get("variable"), field.metadata.get("when")
        if getattr(settings, field.name) is not None:
            user_set.add(field.name)
        elif variable is not None and (defaults or env.is_set(variable)) and (when is None or when(settings)):
            setattr(settings, field.name, env.get(variable))
    return user_set
