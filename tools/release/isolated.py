"""Install each package's wheel alone, with what it declares and nothing else, and use what was installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from release.build import wheel_name
from repo_checks.declared import requirements
from repo_checks.tree import Package

__all__ = ["check_alone", "closure"]

_PROGRAMS = Path(__file__).parent / "programs"


def closure(package: Package, found: Mapping[str, Package]) -> list[Package]:
    """Return a package and the siblings that it declares, with those that they declare.

    Args:
        package: The package.
        found: All packages by import name.
    """
    reached = {package.name: package}
    for requirement in requirements(package):
        sibling = found.get(canonicalize_name(requirement.name).replace("-", "_"))
        if sibling is not None:
            reached |= {each.name: each for each in closure(sibling, found)}
    return list(reached.values())


def check_alone(found: Mapping[str, Package], dist: Path, folder: Path) -> list[str]:
    """Return what is wrong with the packages when each is installed alone.

    One environment serves all, which begins empty: before each package everything is taken out that it does
    not declare. So torch, which all need, is compiled once.

    Args:
        found: All packages by import name, the lowest layer first.
        dist: The folder of the wheels.
        folder: An empty folder for the environment and what the programs write.
    """
    _run([_uv(), "venv", "--quiet", "--python", sys.executable, str(folder / "env")], folder)
    problems = []
    for package in found.values():
        problem = _problem(package, found, dist, folder)
        print(f"{package.folder.name}, installed alone: {problem or 'ok'}", flush=True)
        if problem:
            problems.append(f"{package.folder.name}, installed alone: {problem}")
    return problems


def _problem(package: Package, found: Mapping[str, Package], dist: Path, folder: Path) -> str:
    python = folder / "env" / "bin" / "python"
    try:
        _install(package, found, dist, python)
        _use(package, found, python, folder)
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} ended with {error.returncode}:\n{error.output.rstrip()}"
    return ""


def _uv() -> str:
    """Return hatch's uv, which it names to its commands; any on the PATH without hatch."""
    return os.environ.get("HATCH_UV", "uv")


def _install(package: Package, found: Mapping[str, Package], dist: Path, python: Path) -> None:
    """Install a package with the dependencies that it declares, and take out everything else."""
    # Every sibling by its path: of these names the package index may have projects of somebody else's.
    wheels = [str(dist / wheel_name(each)) for each in closure(package, found)]
    _run([_uv(), "pip", "install", "--quiet", "--exact", "--python", str(python), *wheels], dist)
    _run([_uv(), "pip", "check", "--quiet", "--python", str(python)], dist)


def _use(package: Package, found: Mapping[str, Package], python: Path, folder: Path) -> None:
    """Import every module, print the help of every command, and train if all packages are installed."""
    declared = ",".join(each.name for each in closure(package, found))
    program = str(_PROGRAMS / "import_all.py")
    _run([str(python), "-I", program, package.name, declared, ",".join(found)], folder)
    for script in package.project.get("scripts", {}):  # type: ignore[attr-defined]
        _run([str(python.parent / script), "--help"], folder)
    if package.name == "accel":
        train = [str(python.parent / "accel"), "launch", "--cpu", str(_PROGRAMS / "train.py")]
        _run(train, folder)


def _run(command: Sequence[str], folder: Path) -> None:
    # Nothing of the current environment: the repository's modules may not be found.
    environ = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=True,
    )
