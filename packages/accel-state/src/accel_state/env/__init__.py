"""The environment contract: read, write and patch the variables of `env.table`.

The one module that touches `os.environ`. A launcher writes a child's variables with `put`, a library reads
them with `get`; names, kinds and defaults stand in `accel_state.env.table` alone. Standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from accel_state.env.table import VARIABLES
from accel_state.env.variable import Variable, parse_flag

__all__ = [
    "VARIABLES",
    "CPUInformation",
    "Variable",
    "are_libraries_initialized",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get",
    "get_cpu_distributed_information",
    "get_int_from_env",
    "is_set",
    "keep_accelerate_environment",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "put",
    "raw",
    "set",
    "snapshot",
    "str_to_bool",
    "update",
]


def raw(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return a variable's text, or None when it is unset.

    Args:
        name: Any variable's name, in the table or not.
        environ: The mapping to read; this process's environment by default.
    """
    return (os.environ if environ is None else environ).get(name)


def is_set(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a variable has a text; an empty one counts as unset.

    Args:
        name: Any variable's name, in the table or not.
        environ: The mapping to read; this process's environment by default.
    """
    return bool(raw(name, environ))


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Return a variable's value, or its default when it is unset or empty.

    Args:
        name: A name of `VARIABLES`.
        environ: The mapping to read; this process's environment by default.

    Returns:
        The parsed value; its type is that of the variable's kind, or None where the default is None.

    Raises:
        KeyError: If the table does not have the name.
        ValueError: If the text is not valid; the message names the variable, the text and what is allowed.
    """
    variable = VARIABLES[name]
    text = (os.environ if environ is None else environ).get(name)
    # An empty text counts as unset: shells and YAML files have no other way to unset a variable.
    return variable.parse(text) if text else variable.default


def put(environ: MutableMapping[str, str], name: str, value: Any) -> None:
    """Write a value into the environment of a child process.

    Args:
        environ: The mapping to change.
        name: A name of `VARIABLES`.
        value: The value; None removes the variable, so that the child sees the default.

    Raises:
        KeyError: If the table does not have the name.
        ValueError: If the value is not valid for the variable.
    """
    variable = VARIABLES[name]
    if value is None:
        environ.pop(name, None)
    else:
        environ[name] = variable.format(value)


def set(name: str, value: Any) -> None:
    """Set a variable in this process's environment.

    Args:
        name: A name of `VARIABLES`.
        value: The value; None removes the variable.

    Raises:
        KeyError: If the table does not have the name.
        ValueError: If the value is not valid for the variable.
    """
    put(os.environ, name, value)


def update(environ: Mapping[str, str]) -> None:
    """Set several variables in this process's environment, in the table or not; others stay unchanged.

    Args:
        environ: The variables, with their texts.
    """
    os.environ.update(environ)


def snapshot() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Read a truth value: y, yes, t, true, on, 1 or n, no, f, false, off, 0, in any letter case.

    Args:
        value: The text; a bool or integer is read as its text.
        to_bool: Return a bool rather than 1 or 0.

    Returns:
        1 or 0, or True or False.

    Raises:
        ValueError: If the text is none of these.
    """
    truth = parse_flag(str(value))
    return truth if to_bool else int(truth)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return a variable read as a truth value.

    Args:
        key: Any variable's name.
        default: The result when it is unset or empty.

    Returns:
        The truth value.

    Raises:
        ValueError: If its text is not a truth value.
    """
    text = os.environ.get(key)
    if not text:
        return bool(default)
    return bool(Variable(key, "flag", default, "Read as a truth value.").parse(text))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return a variable's text.

    Args:
        key: Any variable's name.
        default: The result when it is unset.

    Returns:
        The text.
    """
    # str(), as the default may be an enumeration.
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Return the first non-negative integer among several variables.

    Args:
        env_keys: The names, in order of preference.
        default: The result when none of them has one.

    Returns:
        The integer.

    Raises:
        ValueError: If a variable's text is not an integer.
    """
    for key in env_keys:
        text = os.environ.get(key)
        if text:
            value: int = Variable(key, "int", None, "Read as an integer.").parse(text)
            # A negative number counts as unset: scripts use -1 for a run without a launcher.
            if value >= 0:
                return value
    return default


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Write variables as `NAME=value` lines, for environment files (such as `.deepspeed_env`).

    Args:
        current_env: The variables.

    Returns:
        One line per variable, with its line break. A variable that such a file cannot contain (one of `;`,
        `<`, `>`, space or a line break in its name or value) is left out with a warning.
    """
    from accel_state.logging.warning import warn

    lines = []
    for name, value in current_env.items():
        if name and not any(character in name + value for character in ";\n<> "):
            lines.append(f"{name}={value}\n")
        else:
            warn(
                f"Environment variable {name!r} is left out: an environment file cannot contain ';', '<', "
                f"'>', a space or a line break, and its value is {value!r}.",
            )
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the named libraries that this process has imported already.

    Args:
        *library_names: Import names.

    Returns:
        The imported ones, in the same order.
    """
    return [name for name in library_names if name in sys.modules]


class CPUInformation(NamedTuple):
    """The ranks of this process and the numbers of processes."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


# In order of preference: torch, MPICH and Intel MPI, Open MPI, MVAPICH2.
_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
_LOCAL_SIZE = (
    "LOCAL_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)


def get_cpu_distributed_information() -> CPUInformation:
    """Return the ranks and sizes that torchrun, MPICH, Intel MPI, Open MPI or MVAPICH2 gave this process.

    Torch's variables win over MPI's. Unset values are those of a single process.

    Returns:
        rank, world_size, local_rank and local_world_size.

    Raises:
        ValueError: If a variable is not an integer, or the rank is not below the number of processes.
    """
    information = CPUInformation(
        rank=get_int_from_env(_RANK, 0),
        world_size=get_int_from_env(_SIZE, 1),
        local_rank=get_int_from_env(_LOCAL_RANK, 0),
        local_world_size=get_int_from_env(_LOCAL_SIZE, 1),
    )
    # Only one of the two variables was set, or by another launcher.
    if information.rank >= information.world_size:
        raise ValueError(
            f"The environment has rank {information.rank} of {information.world_size} processes; ranks count "
            f"from 0. Set both RANK and WORLD_SIZE, or unset both. (Read from {', '.join(_RANK + _SIZE)}.)"
        )
    return information


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables inside a `with` block and restore them afterwards, also after an exception.

    Args:
        **kwargs: Variables by name; names are upper-cased and values written as text.

    Yields:
        Nothing.
    """
    # Upper case, as keyword arguments are usually written in lower case.
    patch = {name.upper(): str(value) for name, value in kwargs.items()}
    # None for a variable that was not set, which is then removed again.
    before = {name: os.environ.get(name) for name in patch}
    os.environ.update(patch)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment inside a `with` block and restore it afterwards, also after an exception.

    Variables set inside the block are removed after it.

    Yields:
        Nothing.
    """
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _restore(before: Mapping[str, str | None]) -> None:
    for name, text in before.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


@contextmanager
def keep_accelerate_environment() -> Iterator[None]:
    """Restore the ACCELERATE_* variables after a `with` block, also after an exception.

    Variables set inside the block are removed after it.

    Yields:
        Nothing.
    """
    before = {name: text for name, text in os.environ.items() if name.startswith("ACCELERATE_")}
    try:
        yield
    finally:
        # A list, as the environment must not change during iteration.
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            if name not in before:
                del os.environ[name]
        os.environ.update(before)
