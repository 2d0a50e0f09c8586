"""`accel tpu-config`: run commands on every machine of a TPU pod, to prepare it."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from accel_launch.commands.launch import read_config
from accel_launch.errors import LaunchError
from accel_launch.launchers.tpu.gcloud import pod_command
from accel_launch.plan.launcher_table import exec_launcher
from accel_launch.plan.plan import LauncherCommand
from accel_launch.settings.parser import command_parser
from accel_launch.settings.redact import redact_command
from accel_state import env


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accel tpu-config`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers()` returned, to add `tpu-config` there; a parser of
            its own by default.

    Returns:
        The parser. Its namespace is for `tpu_command_launcher`, which it has as `func`.
    """
    parser = command_parser(
        "tpu-config",
        subparsers,
        func=tpu_command_launcher,
        description="Run commands on every machine of a TPU pod, to prepare it for `accel launch`.",
        examples=(
            "accel tpu-config --command 'pip install datasets'",
            "accel tpu-config --tpu_name pod --command_file prepare.txt --dry_run",
        ),
    )
    where = parser.add_argument_group("which pod; by default that of the config file")
    where.add_argument("--config_file", "--config-file", help="The config file; the default one by default.")
    where.add_argument("--tpu_name", "--tpu-name", help="The pod's name (key tpu_name).")
    where.add_argument("--tpu_zone", "--tpu-zone", help="Its zone (key tpu_zone).")
    what = parser.add_argument_group("what to run; by default the config file's command_file or commands")
    what.add_argument("--command_file", "--command-file", help="A file of commands, one a line.")
    what.add_argument("--command", action="append", nargs="+", help="A command; may be repeated.")
    what.add_argument(
        "--install_accelerate", "--install-accelerate", action="store_true", help=argparse.SUPPRESS
    )
    what.add_argument("--accelerate_version", "--accelerate-version", help=argparse.SUPPRESS)
    parser.add_argument(
        "--debug",
        "--dry_run",
        "--dry-run",
        action="store_true",
        help="Print the gcloud command; run nothing.",
    )
    return parser


def setup_command(args: argparse.Namespace) -> list[str]:
    """Return the gcloud command for parsed arguments.

    Args:
        args: What the parser returned.

    Raises:
        LaunchError: If the pod is not named, there is nothing to run, or a file is missing.
    """
    if args.install_accelerate or args.accelerate_version:
        raise LaunchError(
            "--install_accelerate and --accelerate_version cannot say which packages of accel to install. "
            "Give --command 'pip install ...' with what you want on the pod."
        )
    found = read_config(args)
    config: Any = {} if found is None else found.values
    commands = _commands(args, config)
    name, zone = args.tpu_name or config.get("tpu_name"), args.tpu_zone or config.get("tpu_zone")
    # One line, as gcloud takes one command.
    return pod_command(name, zone, "; ".join(commands))


def _commands(args: argparse.Namespace, config: Any) -> list[str]:
    """Return what to run: the flags' commands, else the config file's."""
    places = [(args.command_file, args.command), (config.get("command_file"), config.get("commands"))]
    # Either all from flags or all from the config: a mix would be a third list.
    for file, commands in places:
        found = _lines(file) if file else []
        found += [command if isinstance(command, str) else " ".join(command) for command in commands or ()]
        if found:
            return found
    raise LaunchError("There is nothing to run. Give --command 'pip install ...' or --command_file FILE.")


def _lines(file: str) -> list[str]:
    path = Path(file).expanduser()
    if not path.is_file():
        raise LaunchError(f"There is no command file {path}. Write one with a command a line.")
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Print the gcloud command, and let it take the place of this process, unless it is only to be shown.

    Args:
        args: What the parser returned.

    Raises:
        LaunchError: As `setup_command`, or if there is no gcloud.
    """
    command = setup_command(args)
    # Flushed: exec replaces this process, and with it what is still in the buffer.
    print(shlex.join(redact_command(command)), flush=True)
    if not args.debug:
        exec_launcher(LauncherCommand(command, env.snapshot(), "gcloud"))
