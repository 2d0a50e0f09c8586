"""`accel test`: a self-check of the current configuration on the processes that it starts."""

from __future__ import annotations

import argparse
from typing import Any

from accel_launch.errors import LaunchError
from accel_launch.parser import HelpFormatter, LaunchParser, add_settings

__all__ = ["register", "test_command"]

_DESCRIPTION = (
    "Start the processes of the current configuration and check that they communicate, share out data, train "
    "as one process would, and save and load. Takes the flags of `accel launch`."
)


def register(subparsers: Any) -> argparse.ArgumentParser:
    """Add `test` to the commands of `accel`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers()` returned.

    Returns:
        The parser.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "test",
        usage="accel test [flags of accel launch]",
        description=_DESCRIPTION,
        formatter_class=HelpFormatter,
    )
    parser.__class__ = LaunchParser  # add_parser has no argument for the class
    add_settings(parser)
    parser.set_defaults(func=test_command)
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Run the self-check under the launcher.

    Args:
        args: The parsed flags.

    Raises:
        LaunchError: If the configuration cannot be started.
        SystemExit: With the exit code of the first process whose check failed.
    """
    from accel_launch.command import launch_command

    if args.training_script is not None:
        raise LaunchError(
            f"accel test takes no script, got {args.training_script!r}; it runs a script of its own."
        )
    args.module, args.no_python = True, None
    args.training_script = "accel.commands.self_check"
    args.training_script_args = []
    launch_command(args)
