"""The command `accel` and its subcommands; each is imported when it is called.

Other packages add subcommands through the entry-point group `accel.commands`: the entry point's name is the
command's, its value a function that takes the subparsers action of argparse, adds a parser of that name, and
sets its default `func` to a function of the parsed arguments.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from accel_launch.__about__ import __version__
from accel_launch.errors import LaunchError, NotAvailableError

if TYPE_CHECKING:
    import argparse
    from importlib.metadata import EntryPoint

# name: (module of accel_launch.commands:function that returns the parser, what it does)
_COMMANDS = {
    "launch": (
        "launch:launch_command_parser",
        "Start a script on one process or on many.",
    ),
    "config": ("config:config_parser", "Write or update the config file."),
    "env": (
        "env:env_parser",
        "Print what a bug report needs: versions, hardware, config.",
    ),
    "to-fsdp2": (
        "to_fsdp2:to_fsdp2_command_parser",
        "Rewrite a config file of FSDP version 1 for version 2.",
    ),
    "tpu-config": (
        "tpu:tpu_command_parser",
        "Run commands on every machine of a TPU pod.",
    ),
}
# Commands of the other packages here: name: (package, what it does).
# Known by name, so that a command that is not installed is answered with the package that has it.
_SIBLINGS = {
    "estimate-memory": ("accel", "Estimate how much memory a model needs on each device."),
    "merge-weights": ("accel-ckpt", "Make one weight file of a sharded checkpoint."),
    "replay": ("accel", "Recompute a loss that was not finite, bit for bit."),
    "report": ("accel", "Draw what a run logged, and where its time went, as one HTML page."),
    "test": ("accel", "Check that processes of this setup communicate, split data, train and save."),
    "verify": (
        "accel",
        "Check that a script trains the same on one process and on many, or say what differs.",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `accel`.

    Args:
        argv: The tokens behind `accel`; those of the command line by default.

    Returns:
        The exit code.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    # `accel help COMMAND` is `accel COMMAND --help`.
    if tokens[:1] == ["help"]:
        tokens = [*tokens[1:], "--help"]
    if not tokens or tokens[0] in ("-h", "--help"):
        print(_help())
        return 0
    if tokens[0] in ("--version", "-V"):
        print(f"accel {__version__}")  # all packages of accel have the same version
        return 0
    name, rest = tokens[0], tokens[1:]
    if name in _COMMANDS:
        return _run_builtin(name, rest)
    # Only for names that are not built in: to look for entry points reads the
    # metadata of every installed package.
    points = {point.name: point for point in _entry_points()}
    if name in points:
        return _run(f"accel {name}", lambda: _foreign(points[name], rest))
    return _run("accel", lambda: _unknown(name, points))


def launch_main(argv: Sequence[str] | None = None) -> int:
    """Run `accel-launch`, which is `accel launch`.

    Args:
        argv: The tokens behind `accel-launch`; those of the command line by default.

    Returns:
        The exit code.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    return _run_builtin("launch", tokens)


def config_main(argv: Sequence[str] | None = None) -> int:
    """Run `accel-config`, which is `accel config`.

    Args:
        argv: The tokens behind `accel-config`; those of the command line by default.

    Returns:
        The exit code.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    return _run_builtin("config", tokens)


def _run(prog: str, command: Callable[[], int]) -> int:
    """Run a command; what a user can fix is one line, not a traceback."""
    # For the length of the process: a command is all that it runs.
    warnings.showwarning = _show_warning(prog)
    try:
        return command()
    # OSError as well: a file that cannot be read is named in its message.
    except (LaunchError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    # 128 + SIGINT, as shells report a program that Ctrl-C has ended.
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python before 3.12 wraps those of __set_name__
            return 130
        raise


def _show_warning(prog: str) -> Callable[..., None]:
    def show(message: Warning | str, *_: Any) -> None:
        print(f"{prog}: warning: {message}", file=sys.stderr)

    return show


def _run_builtin(name: str, rest: list[str]) -> int:
    """Run a command of this package; its errors have the same prefix however it was called."""
    from importlib import import_module

    def command() -> int:
        module, _, function = _COMMANDS[name][0].partition(":")
        return _call(getattr(import_module(f"accel_launch.commands.{module}"), function)(), rest)

    return _run(f"accel {name}", command)


def _call(parser: argparse.ArgumentParser, tokens: Sequence[str]) -> int:
    """Call the function that a parser sets, which returns an exit code or nothing."""
    args = parser.parse_args(tokens)
    # None counts as success: entry points of other packages need not return a code.
    return int(args.func(args) or 0)


def _entry_points() -> list[EntryPoint]:
    from importlib.metadata import entry_points

    return sorted(entry_points(group="accel.commands"), key=lambda point: point.name)


def _foreign(point: EntryPoint, rest: list[str]) -> int:
    """Run another package's subcommand."""
    import argparse

    parser = argparse.ArgumentParser("accel")
    point.load()(parser.add_subparsers(dest="command", required=True))
    return _call(parser, [point.name, *rest])


def _unknown(name: str, points: Iterable[str]) -> NoReturn:
    """Raise an error about a command that is not there."""
    from accel_launch.settings.schema import nearest
    from accel_state.imports.packages import install_hint

    if name in _SIBLINGS:
        package = _SIBLINGS[name][0]
        raise NotAvailableError(
            f"`accel {name}` comes with the package {package}, which is not installed. Install it with: "
            f"{install_hint(None, package)}."
        )
    names = [*_COMMANDS, *points]
    raise LaunchError(f"unknown command {name!r}.{nearest(name, names)} Known: {', '.join(names)}.")


def _help() -> str:
    rows = [(name, text) for name, (_, text) in _COMMANDS.items()]
    for point in _entry_points():
        _, text = _SIBLINGS.get(point.name, ("", f"From {point.dist.name if point.dist else point.module}."))
        rows.append((point.name, text))
    import shutil
    import textwrap

    width, indent = shutil.get_terminal_size().columns, " " * 20
    lines = "\n".join(
        textwrap.fill(f"  {name:18}{text}", width, subsequent_indent=indent) for name, text in rows
    )
    return (
        "usage: accel COMMAND [arguments]\n\n"
        f"commands:\n{lines}\n\n"
        "`accel help COMMAND` describes a command; `accel --version` prints the version."
    )
