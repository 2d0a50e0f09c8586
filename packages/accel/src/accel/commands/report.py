"""`accel report`: one HTML page of what a run logged, and of where its time went."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from accel_launch.errors import LaunchError
from accel_launch.settings.parser import command_parser


def report_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accel report`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers()` returned, to add `report` there; by default a
            separate parser.

    Returns:
        The parser. Its namespace is for `report_command`, which it has as `func`.
    """
    parser = command_parser(
        "report",
        subparsers,
        func=report_command,
        description="Draw what a run has logged so far, and where its time went, as one HTML page that needs "
        "no network. It reads the files of the tracker 'jsonl', and the statistics next to them.",
        examples=(
            "accel report runs/digits.jsonl",
            "accel report runs --output digits.html",
        ),
    )
    parser.add_argument(
        "run",
        type=Path,
        help="A file of JSON lines, or a folder with such files: curves of one name are drawn in one plot.",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="The page; default: report.html in the folder of the run.",
    )
    return parser


register = report_command_parser  # what the entry point of `accel report` names


def report_command(args: argparse.Namespace) -> None:
    """Write the page, and print where it is.

    Args:
        args: The parsed arguments.

    Raises:
        LaunchError: If there is nothing of a run, or the page cannot be written.
    """
    from accel.observe.report.page import render
    from accel.observe.report.read import read_runs

    try:
        runs = read_runs(args.run)
    except FileNotFoundError as error:
        raise LaunchError(str(error)) from None
    folder = args.run if args.run.is_dir() else args.run.parent
    output = args.output or folder / "report.html"
    try:
        output.write_text(render(runs), encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{output} cannot be written: {error.strerror}. Give a file with -o.") from None
    print(output)
