"""`accel launch`: from the command line to running processes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from accel_launch.errors import LaunchError
from accel_launch.parser import launch_command_parser
from accel_launch.plan import Plan, make_plan
from accel_launch.resolve import Settings, resolve
from accel_state import env

if TYPE_CHECKING:
    from accel_launch.config import LaunchConfig

__all__ = ["launch_command", "launch_command_parser", "main", "plan_of"]


def launch_command(args: argparse.Namespace) -> None:
    """Start what parsed arguments ask for.

    One process replaces this one (exec) and so never returns; otherwise this returns when all workers have
    ended well.

    Args:
        args: What `launch_command_parser().parse_args()` returned.

    Raises:
        LaunchError: If it cannot be started; nothing was.
        SystemExit: With the exit code of the worker that failed first.
    """
    environ = env.snapshot()
    settings = resolve(args, _config(args), environ)
    script = getattr(args, "training_script", None)
    if settings.value("explain") and script is None:
        print(_explained(settings))
        return
    plan = _plan(args, settings, environ)
    if settings.value("explain"):
        print(_explained(plan.settings))
    if settings.value("dry_run"):
        print(_dry_run(plan, environ))
    if not (settings.value("explain") or settings.value("dry_run")):
        _start(plan)


def plan_of(args: argparse.Namespace) -> Plan:
    """Return what parsed arguments ask for, without starting it.

    Args:
        args: What `launch_command_parser().parse_args()` returned.

    Raises:
        LaunchError: If it cannot be started.
    """
    environ = env.snapshot()
    return _plan(args, resolve(args, _config(args), environ), environ)


def _plan(args: argparse.Namespace, settings: Settings, environ: Mapping[str, str]) -> Plan:
    script = getattr(args, "training_script", None)
    if script is None:
        raise LaunchError("No script was given: accel launch [flags] SCRIPT [arguments of the script].")
    return make_plan(settings, script, args.training_script_args or [], environ)


def _config(args: argparse.Namespace) -> LaunchConfig | None:
    """Read the config file that a flag names, or the default one if there is one."""
    named = getattr(args, "config_file", None)
    from accel_launch.config.paths import config_path

    if named is None and not config_path().is_file():
        return None
    # Only now: YAML takes longer to import than everything else here together.
    from accel_launch.config.file import load_config_from_file

    return load_config_from_file(named)


def _explained(settings: Settings) -> str:
    from accel_launch.report import explain_text

    return explain_text(settings)


def _dry_run(plan: Plan, environ: Mapping[str, str]) -> str:
    from accel_launch.report import dry_run_text, plan_note

    command: Sequence[str] = plan.command
    changed = plan.environ
    if plan.how == "torchrun":
        from accel_launch.torchrun import torchrun_command, torchrun_environment, torchrun_port

        port, held = torchrun_port(plan)
        if held is not None:
            held.close()
        command, changed = torchrun_command(plan, port), torchrun_environment(plan)
    elif plan.how == "mpirun":
        from accel_launch.mpi import mpirun_command, mpirun_environment, mpirun_port

        port, held = mpirun_port(plan)
        if held is not None:
            held.close()
        changed = mpirun_environment(plan, port)
        command = mpirun_command(plan, changed, environ)
    elif plan.how == "local":
        from accel_launch.environment import worker_environment
        from accel_launch.ports import reserve_port

        asked = plan.settings["main_process_port"]
        with reserve_port(asked.value, asked.detail) as held:
            changed = worker_environment(plan.environ, 0, plan.processes, "127.0.0.1", held.getsockname()[1])
    return dry_run_text(plan_note(plan), command, changed, environ)


def _start(plan: Plan) -> None:
    if plan.how == "local":
        from accel_launch.local import run_local

        code = run_local(plan)
        if code:
            sys.exit(code)
    elif plan.how == "torchrun":
        from accel_launch.torchrun import (
            reach_machine_0,
            torchrun_command,
            torchrun_environment,
            torchrun_port,
        )

        port, held = torchrun_port(plan)
        reach_machine_0(plan, port)
        if held is not None:
            held.set_inheritable(True)  # stays reserved until torchrun ends
        _replace(torchrun_command(plan, port), torchrun_environment(plan))
    elif plan.how == "mpirun":
        from accel_launch.mpi import mpirun_command, mpirun_environment, mpirun_port

        port, held = mpirun_port(plan)
        changed = mpirun_environment(plan, port)
        command = mpirun_command(plan, changed, env.snapshot())
        if held is not None:
            held.set_inheritable(True)  # stays reserved until mpirun ends
        _replace(command, changed)
    else:
        _replace(plan.command, plan.environ)


def _replace(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Become another program; what was printed so far goes out first."""
    sys.stdout.flush()
    sys.stderr.flush()
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):  # an ignored signal would stay so
        signal.signal(ignored_by_python, signal.SIG_DFL)
    os.execvpe(command[0], list(command), dict(environ))


def main(argv: Sequence[str], prog: str = "accel launch") -> int:
    """Run `accel launch`.

    Args:
        argv: The tokens behind the command's name.
        prog: The command's name, for messages.

    Returns:
        The exit code.
    """
    parser = launch_command_parser()
    parser.prog = prog
    launch_command(parser.parse_args(list(argv)))
    return 0
