"""What is in a wheel or a source archive: the package's own files, and nothing else."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path, PurePosixPath

from repo_checks.tree import Package

__all__ = ["check_sdist", "check_wheel"]

_SUFFIXES = frozenset({".py", ".pyi"})
# Programs without a suffix, which the launcher puts on the PATH of a script.
_PROGRAMS = "accel/drop_in/bin"


@dataclass(frozen=True)
class _Entry:
    """A file of an archive.

    Args:
        data: Its content.
        executable: Whether it may be run.
    """

    data: bytes
    executable: bool


def check_wheel(file: Path, package: Package) -> list[str]:
    """Return what is wrong with a wheel: files, typing marker, licence, description, bytes of other sources.

    Args:
        file: The wheel.
        package: The package that it was built from.
    """
    with zipfile.ZipFile(file) as archive:
        entries = {
            info.filename: _Entry(archive.read(info), bool(info.external_attr >> 16 & 0o100))
            for info in archive.infolist()
        }
    info = f"{package.name}-{package.version}.dist-info"
    made = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    copies = _sources(package, "") | {f"{info}/licenses/LICENSE": package.folder / "LICENSE"}
    problems = list(_compare(entries, copies, made - {f"{info}/entry_points.txt"}, made))
    if f"{package.name}/py.typed" not in entries:
        problems.append("py.typed is missing, without which type checkers see no types")
    if f"{info}/METADATA" in entries:
        problems += _check_metadata(entries[f"{info}/METADATA"].data, package)
    return [f"{file.name}: {problem}" for problem in problems]


def check_sdist(file: Path, package: Package) -> list[str]:
    """Return what is wrong with a source archive: files that are missing, stray or of other sources.

    Args:
        file: The archive.
        package: The package that it was built from.
    """
    root = f"{package.name}-{package.version}"
    entries = {}
    with tarfile.open(file) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                entries[member.name] = _Entry(content.read(), bool(member.mode & 0o100))
    named = [package.folder / name for name in ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml")]
    copies = {f"{root}/{path.name}": path for path in named if path.is_file()}
    copies |= _sources(package, f"{root}/src/")
    # hatchling adds the repository's .gitignore, which is what it leaves out by.
    problems = _compare(entries, copies, {f"{root}/PKG-INFO"}, {f"{root}/PKG-INFO", f"{root}/.gitignore"})
    return [f"{file.name}: {problem}" for problem in problems]


def _sources(package: Package, prefix: str) -> dict[str, Path]:
    """Return the files of the package as they are in an archive."""
    files = (path for path in package.source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"{prefix}{path.relative_to(package.source.parent).as_posix()}": path for path in files}


def _compare(
    entries: Mapping[str, _Entry], copies: Mapping[str, Path], needed: set[str], allowed: set[str]
) -> Iterator[str]:
    """Yield how the files of an archive differ from those that belong there."""
    for name in sorted((copies.keys() | needed) - entries.keys()):
        yield f"{name} is missing"
    for name in sorted(entries.keys() - copies.keys() - allowed):
        yield f"{name} does not belong there"
    for name in sorted(entries.keys() & copies.keys()):
        entry, path = entries[name], copies[name]
        if entry.data != path.read_bytes():
            yield f"{name} differs from {path}; build it again"
        if entry.executable < bool(path.stat().st_mode & 0o100):
            yield f"{name} cannot be executed, as {path} can"
        if not _belongs(name, path):
            yield f"{name} is neither a module nor a file that a package needs"


def _belongs(name: str, path: Path) -> bool:
    """Return whether a file is of a kind that is published; tests are not."""
    if path.name in ("CHANGELOG.md", "LICENSE", "README.md", "py.typed", "pyproject.toml"):
        return True
    folder = PurePosixPath(name).parent
    if "tests" in folder.parts or path.name.startswith(("test_", "conftest.")):
        return False
    return path.suffix in _SUFFIXES or str(folder).endswith(_PROGRAMS)


def _check_metadata(data: bytes, package: Package) -> Iterator[str]:
    """Yield what is wrong with the fields that hatchling takes from elsewhere than pyproject.toml."""
    metadata = message_from_bytes(data)
    expected = {
        "Name": package.folder.name,
        "Version": package.version,
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Description-Content-Type": "text/markdown",
        "Requires-Python": ">=3.10",
    }
    for field, value in expected.items():
        if metadata[field] != value:
            yield f"METADATA has {field}: {metadata[field]}, expected {value}"
    description = metadata.get_payload(decode=True)
    assert isinstance(description, bytes)
    if description.decode().strip() != (package.folder / "README.md").read_text().strip():
        yield "METADATA does not have README.md as its description"
