"""`accel replay`: recomputes the losses that the guard has written a bundle of, bit for bit."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from accel_launch.errors import LaunchError
from accel_launch.settings.parser import command_parser
from accel_state import env
from accel_state.env.table import VARIABLES

_DESCRIPTION = (
    "Recompute the losses of a bundle (GuardKwargs(bundle=...)) on one process. The script runs as it did "
    "until its loop gets the first batch: there it gets the weights, the batches and the random generators "
    "of the bundle. Prints both losses with their bits, and where values are first not finite. The exit code "
    "is 0 if all losses are the same, 1 if one differs, 2 if they could not be computed."
)


def replay_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accel replay`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers()` returned, to add `replay` there; by default a
            separate parser.

    Returns:
        The parser. Its namespace is for `replay_command`, which it has as `func`.
    """
    parser = command_parser(
        "replay",
        subparsers,
        description=_DESCRIPTION,
        func=replay_command,
        examples=("accel replay bundles/step_3", "accel replay bundles/step_3 --rank 1"),
    )
    parser.add_argument("bundle", help="the bundle's folder")
    _add_rest(parser)
    return parser


def _add_rest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int, help="whose window; default: the first that was wrong")
    parser.add_argument("script", nargs="?", help="the script; default: the one that wrote the bundle")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="its arguments; default, without a script: those it had"
    )


register = replay_command_parser  # what the entry point of `accel replay` names


def replay_command(args: argparse.Namespace) -> int:
    """Run a script up to the losses of a bundle.

    Args:
        args: The parsed arguments.

    Returns:
        The exit code.

    Raises:
        LaunchError: If there is no bundle, no window of that rank, or no script.
    """
    if args.script is None and args.arguments:
        # argparse takes a flag that follows the bundle, and all after it, for the script's arguments.
        rest = argparse.ArgumentParser(prog="accel replay BUNDLE", allow_abbrev=False)
        _add_rest(rest)
        rest.parse_args(args.arguments, namespace=args)
    from accel.observe.guard.bundle import read_facts, window_file
    from accel.observe.guard.replay import ReplayEnded
    from accel_ckpt.errors import CheckpointError

    folder = Path(args.bundle).absolute()
    try:
        facts = read_facts(folder)
    except CheckpointError as error:
        raise LaunchError(str(error)) from error
    rank = facts["ranks"][0] if args.rank is None else args.rank
    if rank not in facts["ranks"]:
        raise LaunchError(f"{folder} has no window of rank {rank}; it has those of {facts['ranks']}.")
    script = facts["script"] if args.script is None else os.path.abspath(args.script)
    module = facts["module"] if args.script is None else None
    if module is None and not (script and Path(script).is_file()):
        raise LaunchError(
            f"{folder} was written by {script or 'a program without a file'}, which is not here. Name the "
            "script: accel replay BUNDLE SCRIPT [arguments]."
        )
    # What the launcher's flags and its config file were in that run.
    for name, text in facts["environment"].items():
        env.set(name, VARIABLES[name].parse(text))
    env.set("ACCELERATE_REPLAY", str(folder / window_file(rank)))
    arguments = facts["arguments"] if args.script is None else args.arguments
    if args.script is None and Path(facts["folder"]).is_dir():
        os.chdir(facts["folder"])  # what the arguments say may be relative to it
    try:
        _run(script, module, arguments)
    except ReplayEnded as ended:
        return int(ended.code or 0)
    except SystemExit as left:
        print(
            f"accel replay: the script exited ({left.code}) before the losses of the bundle.", file=sys.stderr
        )
    except Exception:
        traceback.print_exc()
        print("accel replay: the script failed before the losses of the bundle.", file=sys.stderr)
    else:
        print("accel replay: the script ended before the losses of the bundle.", file=sys.stderr)
    return 2


def _run(script: str | None, module: str | None, arguments: list[str]) -> None:
    sys.argv = [script or str(module), *arguments]
    if module is not None:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        assert script is not None, "checked"
        sys.path.insert(0, os.path.dirname(script))  # as `python script.py` does
        runpy.run_path(script, run_name="__main__")
