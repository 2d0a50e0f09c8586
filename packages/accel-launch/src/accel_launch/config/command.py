"""`accel config`: write a config file, or bring an old one up to date."""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path

from accel_launch.config.file import LaunchConfig, load_config_from_file
from accel_launch.config.paths import config_path
from accel_launch.config.write import write_basic_config
from accel_launch.errors import LaunchError
from accel_launch.local.machine import Machine
from accel_state import env

__all__ = ["main"]


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog, description="Write the config file of `accel launch`: answer questions, or name a command."
    )
    where = argparse.ArgumentParser(add_help=False)
    for place in (parser, where):
        place.add_argument(
            "--config_file",
            "--config-file",
            default=argparse.SUPPRESS,  # a subparser's default would hide what stands before the command
            help=f"The file; {config_path()} by default.",
        )
    commands = parser.add_subparsers(dest="command", metavar="{default,update}")
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
    args = _parser(prog).parse_args(list(argv), argparse.Namespace(config_file=None))
    if args.command == "default":
        written = write_basic_config(args.mixed_precision, args.config_file)
        if not written:
            return 1
        print(f"Wrote {written}.")
        return 0
    if args.command == "update":
        return _update(args.config_file)
    return _ask(args.config_file)


def _ask(config_file: str | None) -> int:
    """Put the questions, show the file and write it."""
    from accel_launch.config.ask.prompt import open_prompt
    from accel_launch.config.ask.questionnaire import answers_of, ask_all

    path = Path(config_file).expanduser() if config_file is not None else config_path()
    before = answers_of(load_config_from_file(path)) if path.is_file() else {}
    prompt = open_prompt()
    print(f"Questions for {path}{', whose values are the defaults' if before else ''}. {prompt.hint}\n")
    gpus = len(Machine.detect().visible_gpus(env.raw("CUDA_VISIBLE_DEVICES")))
    values = ask_all(prompt, gpus, before, tpu=_has_tpu() or before.get("device") == "tpu")
    if values is None:
        print("Nothing was written.")
        return 1
    LaunchConfig.from_values(values, path).write(path)
    print(f"Wrote {path}.")
    return 0


def _has_tpu(devices: Path = Path("/dev")) -> bool:
    """Tell whether this machine has TPUs: their device files, or torch_xla (which is not imported).

    Linux has a folder `accel` there for accelerators of other kinds.
    """
    return any(devices.glob("accel[0-9]*")) or importlib.util.find_spec("torch_xla") is not None


def _update(config_file: str | None) -> int:
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        config = load_config_from_file(config_file)
    if config.path is None:
        raise LaunchError("There is no file to update.")
    if not notes:
        print(f"{config.path} is up to date.")
        return 0
    if not config.to_dict():
        raise LaunchError(f"All that {config.path} sets has no effect any more: remove it.")
    config.write(config.path)
    for note in notes:
        print(note.message)
    print(f"Updated {config.path}.")
    return 0
