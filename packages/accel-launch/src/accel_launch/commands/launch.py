"""`accel launch`: from the command line to running processes."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_launch.errors import LaunchError
from accel_launch.local.system import require_posix
from accel_launch.plan.launcher_table import LAUNCHERS, exec_launcher
from accel_launch.plan.make import make_plan
from accel_launch.plan.plan import LauncherCommand, LaunchPlan
from accel_launch.settings.parser import launch_flags_parser
from accel_launch.settings.resolve import Settings, resolve
from accel_state import env
from accel_state.enums import ComputeEnvironment

if TYPE_CHECKING:
    from accel_launch.config import LaunchConfig


def launch_command(args: argparse.Namespace) -> None:
    """Start what parsed arguments request.

    One process replaces this one (exec) and so never returns; otherwise this returns when all workers have
    ended well.

    Args:
        args: What `launch_command_parser().parse_args()` returned.

    Raises:
        LaunchError: If it cannot be started; nothing was. So it is on Windows.
        SystemExit: With the exit code of the worker that failed first.
    """
    environ = env.snapshot()
    config = read_config(args)
    # Before anything is resolved: machines and devices here do not matter for a job elsewhere.
    if config is not None and config.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER:
        _launch_job(config, args, environ)
        return
    settings = resolve(args, config, environ)
    _warn_of_keys(settings)
    script = getattr(args, "training_script", None)
    # --explain alone shows the settings; detection needs a script, as it is part of the plan.
    if settings.value("explain") and script is None:
        print(_explained(settings))
        return
    plan = _plan(args, settings, environ)
    if settings.value("explain"):
        print(_explained(plan.settings))
    if settings.value("dry_run") or not settings.value("explain"):
        require_posix(
            "`accel launch`",
            f"For one process run the script itself, `python {plan.script}`; for several use torchrun.",
        )
    if settings.value("dry_run"):
        print(_dry_run(plan, environ))
    if not (settings.value("explain") or settings.value("dry_run")):
        _start(plan, environ)


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accel launch`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers()` returned, to add `launch` there; a parser of its
            own by default.

    Returns:
        The parser. Its namespace has an attribute per setting, None where no flag was given, and
        `training_script` and `training_script_args`.
    """
    return launch_flags_parser(
        "launch",
        subparsers,
        usage="accel launch [flags] SCRIPT [arguments of the script]",
        description="Start a script on one process or on many. A switch is turned off by `=false`, as in "
        "--cpu=false, where the environment or the config file turns it on.",
        func=launch_command,
        examples=(
            "accel launch train.py --lr 0.1",
            "accel launch --num_processes 2 --mixed_precision bf16 train.py",
            "accel launch --use_fsdp --explain train.py",
            "accel launch --num_machines 2 --machine_rank 0 --main_process_ip HOST train.py",
        ),
    )


def _launch_job(config: LaunchConfig, args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    from accel_launch.launchers.sagemaker.job import job_text, run_job

    explain, dry_run = (getattr(args, name, None) for name in ("explain", "dry_run"))
    if explain:
        print(_explained(resolve(args, config, environ)))
    if dry_run:
        print(job_text(config, args))
    if not (explain or dry_run):
        run_job(config, args)


def _warn_of_keys(settings: Settings) -> None:
    keys = [f"--{name}" for name in ("aws_access_key_id", "aws_secret_access_key") if settings.is_set(name)]
    if keys:
        warnings.warn(f"Ignored without a config for Amazon SageMaker: {', '.join(keys)}.", stacklevel=3)


def plan_of(args: argparse.Namespace) -> LaunchPlan:
    """Return what parsed arguments request, without starting it.

    Args:
        args: What `launch_command_parser().parse_args()` returned.

    Raises:
        LaunchError: If it cannot be started.
    """
    environ = env.snapshot()
    return _plan(args, resolve(args, read_config(args), environ), environ)


def _plan(args: argparse.Namespace, settings: Settings, environ: Mapping[str, str]) -> LaunchPlan:
    script = getattr(args, "training_script", None)
    if script is None:
        raise LaunchError("No script was passed: accel launch [flags] SCRIPT [arguments of the script].")
    return make_plan(settings, script, args.training_script_args or [], environ)


def read_config(args: argparse.Namespace) -> LaunchConfig | None:
    """Read the config file that a flag names, or the default one if there is one."""
    named = getattr(args, "config_file", None)
    from accel_launch.config.paths import config_path

    # The import of what reads it is saved where there is none.
    if named is None and not config_path().is_file():
        return None
    # Only now: YAML takes longer to import than everything else here.
    from accel_launch.config.file import load_config_from_file

    return load_config_from_file(named)


def _explained(settings: Settings) -> str:
    from accel_launch.plan.explain import explain_text

    return explain_text(settings)


def _dry_run(plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    from accel_launch.plan.explain import dry_run_text

    prepared: LauncherCommand = LAUNCHERS[plan.launcher].load("prepare")(plan, environ)
    # Nothing will listen on the port that was reserved.
    if prepared.port_socket is not None:
        prepared.port_socket.close()
    return dry_run_text(prepared, environ)


def _start(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    launcher = LAUNCHERS[plan.launcher]
    if launcher.run:
        code = launcher.load("run")(plan)
        # Not for 0: the caller may be a program, which continues.
        if code:
            sys.exit(code)
        return
    prepared: LauncherCommand = launcher.load("prepare")(plan, environ)
    # Last, as it may take minutes: everything else has been checked by then.
    prepared.wait()
    exec_launcher(prepared)
