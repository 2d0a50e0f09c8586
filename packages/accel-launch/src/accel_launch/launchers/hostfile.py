"""Hostfiles: a machine per line, as `name`, `name slots=4` or `name:4`; # begins a comment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel_launch.errors import LaunchError
from accel_launch.settings.schema import nearest

# Open MPI's keys; only slots counts here, and its limits are for mpirun to check.
_KEYS = ("slots", "max_slots", "max-slots")


@dataclass(frozen=True)
class Host:
    """A machine of a hostfile.

    Args:
        name: Its host name or address.
        slots: How many processes it takes; None where the file does not say.
    """

    name: str
    slots: int | None


def read_hostfile(path: str) -> list[Host]:
    """Read a hostfile.

    Args:
        path: The file.

    Returns:
        The machines in order.

    Raises:
        LaunchError: If it is not there, has no machine, or a line that is not understood.
    """
    if not Path(path).is_file():
        raise LaunchError(f"There is no hostfile {path!r}. Write one with a line per machine: NAME slots=4.")
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    hosts = []
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if fields:
            hosts.append(_host(fields, f"Hostfile {path}, line {number}"))
    if not hosts:
        raise LaunchError(f"The hostfile {path} names no machine. Write a line per machine: NAME slots=4.")
    return hosts


def _host(fields: list[str], where: str) -> Host:
    # name:4 is how MPICH and Intel MPI write it.
    name, colon, count = fields[0].partition(":")
    slots = _count(count, where) if colon else None
    if not name or "=" in name:
        raise LaunchError(f"{where}: {fields[0]!r} is not the name of a machine; a line is NAME slots=4.")
    for field in fields[1:]:
        key, equals, value = field.partition("=")
        if key not in _KEYS or not equals:
            hint = nearest(key, _KEYS)
            raise LaunchError(f"{where}: {field!r} is not understood.{hint} A line is NAME slots=4.")
        if key == "slots":
            slots = _count(value, where)
    return Host(name, slots)


def _count(text: str, where: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(f"{where}: {text!r} is not allowed as the number of slots; allowed: 1 or more.")
    return int(text)
