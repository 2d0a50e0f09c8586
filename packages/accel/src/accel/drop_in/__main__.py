"""`python -m accel.drop_in script.py`, or `-m module`: a program on accel, in place of this process."""

from __future__ import annotations

import os
import sys

from accel_launch.errors import LaunchError
from accel_launch.plan.drop_in import drop_in_environment
from accel_state import env

_NAME = "accel.drop_in"
_USAGE = (
    f"usage: python -m {_NAME} [-m] SCRIPT [arguments]\n\nRun a program that imports accelerate on accel."
)


def main() -> None:
    """Become the program that the command line names, in an environment with the switch on."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        sys.exit(0 if arguments else 2)
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.exit(f"{_NAME}: error: Python's options -E, -I and -S keep the switch off; leave them out.")
    try:
        environ = drop_in_environment(env.snapshot())
    except LaunchError as error:
        sys.exit(f"{_NAME}: error: {error}")
    # exec, and no runpy: the program has the sys.path, the sys.argv and the `__main__` that it always has.
    os.execve(sys.executable, [sys.executable, *_options(len(arguments)), *arguments], environ)


def _options(num_arguments: int) -> list[str]:
    """Return the options that this Python was started with, such as -X dev, without the -m of this module."""
    words = sys.orig_argv[1 : len(sys.orig_argv) - num_arguments]
    *options, last = words
    if last == _NAME:
        last = options.pop() + last
    # One-letter options may stand before the m, as in `-um accel.drop_in`.
    last = last.removesuffix(f"m{_NAME}")
    return options if last == "-" else [*options, last]


if __name__ == "__main__":
    main()
