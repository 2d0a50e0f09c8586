"""`accel config`: write a config file, or bring an old one up to date."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

from accel_launch.config.file import load_config_from_file
from accel_launch.config.paths import config_path
from accel_launch.config.write import write_basic_config
from accel_launch.errors import LaunchError, NotAvailableError

__all__ = ["main"]


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, description="Write or update the config file of `accel launch`.")
    commands = parser.add_subparsers(dest="command", metavar="{default,update}")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--config_file", "--config-file", help=f"The file; {config_path()} by default.")
    default = commands.add_parser(
        "default", parents=[where], help="Write a config for this machine: all its GPUs, or one process."
    )
    default.add_argument(
        "--mixed_precision", "--mixed-precision", default="no", help="no, fp16, bf16 or fp8; no by default."
    )
    commands.add_parser(
        "update", parents=[where], help="Rewrite a config file's old forms to the present ones."
    )
    return parser


def main(argv: Sequence[str], prog: str = "accel config") -> int:
    """Run `accel config`.

    Args:
        argv: The tokens behind the command's name.
        prog: The command's name, for messages.

    Returns:
        The exit code.
    """
    args = _parser(prog).parse_args(list(argv))
    if args.command == "default":
        written = write_basic_config(args.mixed_precision, args.config_file)
        if not written:
            return 1
        print(f"Wrote {written}.")
        return 0
    if args.command == "update":
        return _update(args.config_file)
    raise NotAvailableError(
        f"the questionnaire is not there yet. `{prog} default` writes a config for this machine to "
        f"{config_path()}; edit it, or give `accel launch` flags."
    )


def _update(config_file: str | None) -> int:
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        config = load_config_from_file(config_file)
    if config.path is None:
        raise LaunchError("There is no file to update.")
    if not notes:
        print(f"{config.path} is up to date.")
        return 0
    config.write(config.path)
    for note in notes:
        print(note.message)
    print(f"Updated {config.path}.")
    return 0
