"""The command `accel` and its subcommands; each is imported when it is called.

Other packages add subcommands through the entry-point group `accel.commands`: the entry point's name is the
command's, its value a function that takes the subparsers action of argparse, adds a parser of that name, and
sets its default `func` to a function of the parsed arguments.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from accel_launch.__about__ import __version__
from accel_launch.errors import LaunchError, NotAvailableError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["config_main", "launch_main", "main"]

# name: (module with a main(argv, prog), what it does)
_COMMANDS = {
    "launch": ("accel_launch.command", "Start a script on one process or on many."),
    "config": ("accel_launch.config.command", "Write or update the config file."),
    "env": ("accel_launch.env_report", "Print what a bug report needs: versions, hardware, config."),
    "to-fsdp2": ("accel_launch.config.to_fsdp2", "Rewrite a config file of FSDP version 1 for version 2."),
    "tpu-config": ("accel_launch.tpu.command", "Run commands on every machine of a TPU pod."),
}
_LATER = {
    "estimate-memory": "comes with the package accel",
    "merge-weights": "comes with the package accel",
    "test": "comes with the package accel",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `accel`.

    Args:
        argv: The tokens behind `accel`; those of the command line by default.

    Returns:
        The exit code.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    if not tokens or tokens[0] in ("-h", "--help"):
        print(_help())
        return 0
    if tokens[0] in ("--version", "-V"):
        print(f"accel-launch {__version__}")
        return 0
    name, rest = tokens[0], tokens[1:]
    if name in _COMMANDS:
        return _run(f"accel {name}", lambda: _builtin(name)(rest, f"accel {name}"))
    return _run("accel", lambda: _foreign(name, rest))


def launch_main(argv: Sequence[str] | None = None) -> int:
    """Run `accel-launch`, which is `accel launch`.

    Args:
        argv: The tokens behind `accel-launch`; those of the command line by default.

    Returns:
        The exit code.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    return _run("accel-launch", lambda: _builtin("launch")(tokens, "accel-launch"))


def config_main(argv: Sequence[str] | None = None) -> int:
    """Run `accel-config`, which is `accel config`.

    Args:
        argv: The tokens behind `accel-config`; those of the command line by default.

    Returns:
        The exit code.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    return _run("accel-config", lambda: _builtin("config")(tokens, "accel-config"))


def _run(prog: str, command: Callable[[], int]) -> int:
    """Run a command; what a user can mend is one line, not a traceback."""
    warnings.showwarning = _show_warning(prog)
    try:
        return command()
    except (LaunchError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _show_warning(prog: str) -> Callable[..., None]:
    def show(message: Warning | str, *_: Any) -> None:
        print(f"{prog}: warning: {message}", file=sys.stderr)

    return show


def _builtin(name: str) -> Callable[[list[str], str], int]:
    from importlib import import_module

    main: Callable[[list[str], str], int] = import_module(_COMMANDS[name][0]).main
    return main


def _entry_points() -> list[EntryPoint]:
    from importlib.metadata import entry_points

    return sorted(entry_points(group="accel.commands"), key=lambda point: point.name)


def _foreign(name: str, rest: list[str]) -> int:
    """Run another package's subcommand."""
    points = {point.name: point for point in _entry_points()}
    if name in points:
        import argparse

        parser = argparse.ArgumentParser("accel")
        points[name].load()(parser.add_subparsers(dest="command", required=True))
        args = parser.parse_args([name, *rest])
        code = args.func(args)
        return code if isinstance(code, int) else 0
    if name in _LATER:
        raise NotAvailableError(f"`accel {name}` {_LATER[name]}; it is not available here yet.")
    from accel_launch.schema import nearest

    known = [*_COMMANDS, *points]
    raise LaunchError(f"unknown command {name!r}.{nearest(name, known)} Known: {', '.join(known)}.")


def _help() -> str:
    rows = [(name, text) for name, (_, text) in _COMMANDS.items()]
    rows += [
        (point.name, f"From {point.dist.name if point.dist else point.module}.") for point in _entry_points()
    ]
    lines = "\n".join(f"  {name:18}{text}" for name, text in rows)
    return (
        "usage: accel COMMAND [arguments]\n\n"
        f"commands:\n{lines}\n\n"
        "`accel COMMAND --help` describes a command; `accel --version` prints the version."
    )
