"""Build the source archive of each package, and each wheel from its source archive."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from repo_checks.tree import Package

__all__ = ["build", "sdist_name", "wheel_name"]


def build(found: Iterable[Package], dist: Path) -> None:
    """Build all packages into a folder, which is emptied before.

    Args:
        found: The packages.
        dist: The folder.

    Raises:
        RuntimeError: If one cannot be built; the text has what hatchling printed.
    """
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda package: _build(package, dist), found))


def sdist_name(package: Package) -> str:
    """Return the file name of a package's source archive."""
    return f"{package.name}-{package.version}.tar.gz"


def wheel_name(package: Package) -> str:
    """Return the file name of a package's wheel."""
    return f"{package.name}-{package.version}-py3-none-any.whl"


def _build(package: Package, dist: Path) -> None:
    _hatchling("sdist", package.folder, dist)
    with tempfile.TemporaryDirectory() as folder:
        # As pip does where there is no wheel: a file that the archive lacks is missing in the wheel too.
        with tarfile.open(dist / sdist_name(package)) as archive:
            archive.extractall(folder, filter="data")
        _hatchling("wheel", next(Path(folder).iterdir()), dist)


def _hatchling(target: str, folder: Path, dist: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(dist)]
    run = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        raise RuntimeError(f"{target} of {folder}:\n{run.stdout}")
