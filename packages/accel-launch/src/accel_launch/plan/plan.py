"""The plan of a run on this machine, and the program that starts it: plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from accel_launch.settings.resolve import Settings

if TYPE_CHECKING:
    import socket

LauncherName = Literal["exec", "local", "torchrun", "mpirun", "task", "srun", "deepspeed", "pod", "ray"]


@dataclass(frozen=True)
class LaunchPlan:
    """The processes to start on this machine, with their settings.

    Args:
        settings: The effective settings, detected values included.
        launcher: What starts the workers: a name of `LAUNCHERS`.
        script: The script, module or program.
        arguments: Its arguments.
        command: What one worker runs.
        environ: The environment of all workers.
        processes: Workers on this machine; 0 if that is decided elsewhere.
        machines: Smallest and largest number of machines.
    """

    settings: Settings
    launcher: LauncherName
    script: str
    arguments: tuple[str, ...]
    command: tuple[str, ...]
    environ: dict[str, str]
    processes: int
    machines: tuple[int, int]


def _nothing() -> None:
    """Nothing to wait for."""


@dataclass(frozen=True)
class LauncherCommand:
    """The program that starts the workers.

    Args:
        command: The program and its arguments; for a launcher that supervises workers, rank 0's.
        environ: Its environment.
        note: A one-line description.
        port_socket: A socket that reserves the port until the program ends.
        wait: Called before it is started; raises LaunchError if it cannot work.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    note: str
    port_socket: socket.socket | None = None
    wait: Callable[[], None] = _nothing
