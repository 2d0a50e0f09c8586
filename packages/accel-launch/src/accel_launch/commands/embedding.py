"""For programs that start processes themselves and want the launcher's commands and environments."""

from __future__ import annotations

import argparse

from accel_launch.commands.launch import plan_of
from accel_launch.errors import LaunchError
from accel_launch.local.ports import DEFAULT_PORT, reserve_port
from accel_launch.plan.launcher_table import LAUNCHERS
from accel_launch.plan.plan import LauncherCommand, LauncherName
from accel_state import env


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a port of this machine is taken.

    Args:
        port: The port; 29500, where torch's rendezvous is by default, if None.

    Returns:
        True if no server could listen on it now.
    """
    try:
        # By binding, not by connecting: a port may be taken by a process that does not listen yet.
        reserve_port(port or DEFAULT_PORT).close()
    except LaunchError:
        return True
    return False


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return what `accel launch` would run for one process.

    Args:
        args: What `launch_command_parser().parse_args()` returned.

    Returns:
        The command and its full environment.

    Raises:
        LaunchError: If the arguments request something that cannot be started.
    """
    plan = plan_of(args)
    return list(plan.command), dict(plan.environ)


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment that `accel launch` would give to torch.distributed.run.

    Args:
        args: What `launch_command_parser().parse_args()` returned.

    Returns:
        The full environment; torch.distributed.run adds each worker's rank.

    Raises:
        LaunchError: If the arguments request something that cannot be started.
    """
    from accel_launch.launchers.torchrun import torchrun_environment

    return torchrun_environment(plan_of(args))


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return what starts the workers of a run with DeepSpeed.

    That is DeepSpeed's own launcher where it reaches other machines (a hostfile, or several machines and a
    launcher other than standard), the script itself for one process, and torch.distributed.run for several.

    Args:
        args: What `launch_command_parser().parse_args()` returned.

    Returns:
        The command and its full environment.

    Raises:
        LaunchError: If the arguments request something that cannot be started, or not for DeepSpeed.
    """
    plan = plan_of(args)
    if not plan.settings.value("use_deepspeed"):
        raise LaunchError("The arguments do not ask for DeepSpeed. Give --use_deepspeed.")
    # The supervisor of this machine's workers is not a command that others could run.
    name: LauncherName = "torchrun" if plan.launcher == "local" else plan.launcher
    prepared: LauncherCommand = LAUNCHERS[name].load("prepare")(plan, env.snapshot())
    if prepared.port_socket is not None:
        # The caller starts the command itself, and would find the port taken by this process.
        prepared.port_socket.close()
    return list(prepared.command), dict(prepared.environ)


def test_launch() -> None:
    """Join the run that this process is part of: the least that a launched function can do."""
    from accel_state.process.state import PartialState

    PartialState()
