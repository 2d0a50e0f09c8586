"""`accel config`: write a config file, or bring an old one up to date."""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from pathlib import Path

from accel_launch.config.file import LaunchConfig, load_config_from_file
from accel_launch.config.paths import config_path
from accel_launch.config.write import write_basic_config
from accel_launch.errors import LaunchError
from accel_launch.plan.machine import Machine
from accel_launch.settings.parser import HelpFormatter, command_parser
from accel_state import env


def config_parser() -> argparse.ArgumentParser:
    """Return the parser of `accel config`."""
    parser = command_parser(
        "config",
        description="Write the config file of `accel launch`: answer questions, or name a command.",
        examples=(
            "accel config",
            "accel config --config_file two_gpus.yaml",
            "accel config default --mixed_precision bf16",
            "accel config update --config_file old.yaml",
        ),
    )
    # Before the arguments, as it would be the default of each: that of a subparser would hide what stands
    # before the command.
    parser.set_defaults(config_file=None, func=_run_questionnaire)
    where = argparse.ArgumentParser(add_help=False)
    for place in (parser, where):
        place.add_argument(
            "--config_file",
            "--config-file",
            default=argparse.SUPPRESS,
            help=f"The file; {config_path()} by default.",
        )
    commands = parser.add_subparsers(metavar="{default,update}")
    default = commands.add_parser(
        "default",
        parents=[where],
        formatter_class=HelpFormatter,
        help="Write a config for this machine: all its GPUs, or one process.",
    )
    default.add_argument(
        "--mixed_precision", "--mixed-precision", default="no", help="no, fp16, bf16 or fp8; no by default."
    )
    default.set_defaults(func=_write_default)
    update = commands.add_parser(
        "update",
        parents=[where],
        formatter_class=HelpFormatter,
        help="Rewrite a config file's old forms to the present ones.",
    )
    update.set_defaults(func=_update)
    return parser


def _write_default(args: argparse.Namespace) -> int:
    written = write_basic_config(args.mixed_precision, args.config_file)
    if written:
        print(f"Wrote {written}.")
    # A file that was there already is a failure for scripts, which expect their own values in it.
    return 0 if written else 1


def _run_questionnaire(args: argparse.Namespace) -> int:
    """Put the questions, show the file and write it."""
    from accel_launch.config.ask.prompt import open_prompt, wrap
    from accel_launch.config.ask.questionnaire import answers_of, ask_all

    path = Path(args.config_file).expanduser() if args.config_file is not None else config_path()
    before = answers_of(load_config_from_file(path)) if path.is_file() else {}
    prompt = open_prompt()
    about = f"Questions for {path}{', whose values are the defaults' if before else ''}."
    print("\n".join(wrap(f"{about} {prompt.hint}")), end="\n\n")
    # GPUs that the user has hidden are not offered.
    gpus = len(Machine.detect().visible_gpus(env.raw("CUDA_VISIBLE_DEVICES")))
    values = ask_all(prompt, gpus, before, tpu=_has_tpu() or before.get("device") == "tpu")
    if values is None:
        print("Nothing was written.")
        return 1
    LaunchConfig.from_values(values, path).write(path)
    print(f"Wrote {path}.")
    return 0


def _has_tpu(devices: Path = Path("/dev")) -> bool:
    """Return whether this machine has TPUs: their device files, or torch_xla (which is not imported).

    Linux has a folder `accel` there for accelerators of other kinds.
    """
    return any(devices.glob("accel[0-9]*")) or importlib.util.find_spec("torch_xla") is not None


def _update(args: argparse.Namespace) -> int:
    # The warnings of reading are the list of changes; "always", as a filter may show equal ones once only.
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        config = load_config_from_file(args.config_file)
    assert config.path is not None, "it was read from a file"
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
