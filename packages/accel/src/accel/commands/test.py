"""`accel test`: a self-check of the current configuration on the processes that it starts."""

from __future__ import annotations

import argparse
from typing import Any

from accel_launch.errors import LaunchError
from accel_launch.settings.parser import launch_flags_parser

_DESCRIPTION = (
    "Start the processes of the current configuration and check that they communicate, split data, train "
    "as one process would, and save and load. Takes the flags of `accel launch`."
)


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028 - no test
    """Return the parser of `accel test`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers()` returned, to add `test` there; its own parser
            by default.

    Returns:
        The parser. Its namespace is for `test_command`, which it has as `func`.
    """
    usage = "accel test [flags of accel launch]"
    return launch_flags_parser(
        "test",
        subparsers,
        usage=usage,
        description=_DESCRIPTION,
        func=test_command,
        examples=("accel test", "accel test --cpu --num_processes 2"),
    )


register = test_command_parser  # what the entry point of `accel test` names


def test_command(args: argparse.Namespace) -> None:
    """Run the self-check under the launcher.

    Args:
        args: The parsed flags.

    Raises:
        LaunchError: If the configuration cannot be started.
        SystemExit: With the exit code of the first process whose check failed.
    """
    from accel_launch.commands.launch import launch_command

    if args.training_script is not None:
        raise LaunchError(
            f"accel test takes no script, got {args.training_script!r}; it runs its own script."
        )
    args.module, args.no_python = True, None  # as `accel launch -m accel.commands.self_check`
    args.training_script = "accel.commands.self_check"
    args.training_script_args = []
    launch_command(args)
