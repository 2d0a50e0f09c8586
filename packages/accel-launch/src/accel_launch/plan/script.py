"""The command that one worker runs, checked before anything is started."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel_launch.errors import LaunchError
from accel_launch.settings.resolve import Settings


def worker_command(
    settings: Settings, script: str, arguments: Sequence[str], environ: Mapping[str, str]
) -> list[str]:
    """Return what one worker runs.

    Args:
        settings: The effective settings; `module` and `no_python` say what the script is.
        script: A Python file, a folder or archive with `__main__.py`, a module, or a program.
        arguments: Its arguments.
        environ: The environment, for the search path of programs.

    Returns:
        The program and its arguments.

    Raises:
        LaunchError: If there is no such file, module or program.
    """
    if settings.value("no_python"):
        return [_program(script, environ), *arguments]
    is_module = settings.value("module")
    if is_module:
        _check_module(script)
    else:
        _check_file(script)
    if settings.value("tpu"):
        what = [
            settings.value("main_training_function"),
            _devices(settings),
            "module" if is_module else "file",
        ]
        return [sys.executable, "-m", "accel_launch.launchers.tpu.spawn", *what, script, *arguments]
    # This Python, and not "python" on the PATH: accel is installed here.
    return [sys.executable, *(["-m"] if is_module else []), script, *arguments]


def _devices(settings: Settings) -> str:
    """Return one or all: torch_xla takes no other number of processes."""
    count = settings["num_processes"]
    if not count.is_set:
        return "all"
    if count.value == 1:
        return "one"
    warnings.warn(
        f"--tpu ignores num_processes={count.value} (from {count.detail}): torch_xla uses one device or all, "
        "and takes all. Give --num_processes 1 for one, or leave it out.",
        UserWarning,
        stacklevel=4,
    )
    return "all"


def _check_file(script: str) -> None:
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise LaunchError(f"The script {script!r} is a folder without __main__.py; name a Python file.")
    if not path.exists():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        hint = " To run a module or a program, give --module or --no_python." if not path.suffix else ""
        raise LaunchError(f"The script {script!r} does not exist{where}.{hint}")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"The script {script!r} cannot be read; check its permissions.")


def _check_module(name: str) -> None:
    # The top-level package alone: looking for a submodule would import its parents.
    top = name.partition(".")[0]
    # `python -m` looks in the current folder first; this process was started by a script.
    sys.path.insert(0, os.getcwd())
    try:
        found = top.isidentifier() and importlib.util.find_spec(top) is not None
    except ValueError:  # a module without __spec__, such as __main__
        found = False
    finally:
        sys.path.pop(0)
    if not found:
        hint = f" {name!r} is a file: leave --module out." if Path(name).is_file() else ""
        raise LaunchError(f"There is no module {name!r} for {sys.executable}.{hint}")


def _program(name: str, environ: Mapping[str, str]) -> str:
    import shutil

    found = shutil.which(name, path=environ.get("PATH"))
    if found is None:
        exists = Path(name).is_file()
        raise LaunchError(
            f"{name!r} is not executable; run `chmod +x {name}` or leave --no_python out."
            if exists
            else f"There is no program {name!r} on the PATH."
        )
    return found
