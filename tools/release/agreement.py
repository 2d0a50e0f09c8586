"""Versions, the ranges between the packages, changelogs and the files in dist/ agree."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from email import message_from_bytes
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from release.build import sdist_name, wheel_name
from release.contents import check_sdist, check_wheel
from repo_checks.declared import extras, requirements
from repo_checks.tree import Package

__all__ = ["check_changelog", "check_dist", "check_ranges", "check_versions", "entry_of"]

_HEADING = re.compile(r"^## +(.*?) *$", re.MULTILINE)
_UNRELEASED = "Unreleased"


def check_versions(found: Mapping[str, Package]) -> list[str]:
    """Return what is wrong with the versions: all packages have one, as they are tested together."""
    problems = []
    for package in found.values():
        try:
            written = str(Version(package.version))
        except InvalidVersion:
            written = ""
        if written != package.version:
            problems.append(f"{_about(package)}: {package.version!r} is no version; write one such as 0.2.0")
    present = {package.version for package in found.values()}
    if not problems and len(present) > 1:
        listed = ", ".join(f"{package.folder.name} {package.version}" for package in found.values())
        problems.append(f"the packages are released together and need one version: {listed}")
    return problems


def check_ranges(found: Mapping[str, Package]) -> list[str]:
    """Return the declared siblings whose range is not that of the sibling's present minor version."""
    problems = []
    for package in found.values():
        for requirement in chain(requirements(package), *extras(package).values()):
            sibling = found.get(canonicalize_name(requirement.name).replace("-", "_"))
            if sibling is None:
                continue
            expected = _range(Version(sibling.version))
            if {str(each) for each in requirement.specifier} != expected:
                allowed = ",".join(sorted(expected, reverse=True))
                problems.append(
                    f"{package.folder / 'pyproject.toml'}: {requirement} is not the range of "
                    f"{sibling.folder.name} {sibling.version}; write {sibling.folder.name}{allowed}"
                )
    return problems


def _range(version: Version) -> set[str]:
    """Return what a package may ask of a sibling: the same minor version before 1.0, then the major one."""
    low, high = (
        (f"{version.major}", f"{version.major + 1}")
        if version.major
        else (f"0.{version.minor}", f"0.{version.minor + 1}")
    )
    return {f">={low}", f"<{high}"}


def entry_of(package: Package) -> str:
    """Return the heading of a changelog's first entry; empty without one."""
    found = _HEADING.search((package.folder / "CHANGELOG.md").read_text())
    return found[1] if found else ""


def check_changelog(package: Package) -> list[str]:
    """Return what is wrong with a changelog.

    The current version has an entry, as have the versions before it. What changed since then is above it,
    under Unreleased; a release renames this heading to the new version. Without such changes there is none.

    Args:
        package: The package.
    """
    path = package.folder / "CHANGELOG.md"
    if not path.is_file():
        return [f"{path} is missing"]
    title, *rest = _HEADING.split(path.read_text())
    entries = dict(zip(rest[::2], rest[1::2], strict=True))
    problems = [f"{heading} has no text" for heading, text in entries.items() if not text.strip()]
    if len(entries) < len(rest) // 2:
        problems.append("a heading is there twice")
    if title.strip() != f"# Changelog of {package.folder.name}":
        problems.append(f"does not begin with '# Changelog of {package.folder.name}'")
    released = [heading for heading in entries if heading != _UNRELEASED]
    problems += _check_order(released, Version(package.version))
    if _UNRELEASED in entries and next(iter(entries)) != _UNRELEASED:
        problems.append(f"{_UNRELEASED} is not the first entry")
    if package.version not in entries:
        problems.append(
            f"has no entry for version {package.version}: write '## {package.version}' with what changed; "
            f"at a release '## {_UNRELEASED}' is renamed to it"
        )
    return [f"{path}: {problem}" for problem in problems]


def _check_order(released: list[str], present: Version) -> Iterator[str]:
    try:
        versions = [Version(heading) for heading in released]
    except InvalidVersion as error:
        yield f"{error}: an entry's heading is a version, or {_UNRELEASED}"
        return
    if versions != sorted(versions, reverse=True):
        yield f"versions are not in order, the newest first: {', '.join(released)}"
    if versions and max(versions) > present:
        yield f"has an entry for {max(versions)}, but the package's version is {present}"


def check_dist(found: Mapping[str, Package], dist: Path) -> list[str]:
    """Return what is wrong with the built files: one wheel and one source archive of each package as it is.

    Args:
        found: The packages.
        dist: The folder of the files.
    """
    checks = {wheel_name(package): (package, check_wheel) for package in found.values()}
    checks |= {sdist_name(package): (package, check_sdist) for package in found.values()}
    there = {path.name for path in dist.iterdir()} if dist.is_dir() else set()
    problems = [
        f"{dist / name} is missing; run hatch run wheels:build" for name in checks if name not in there
    ]
    problems += [f"{dist / name} is of no present version" for name in sorted(there - checks.keys())]
    for name in sorted(there & checks.keys()):
        package, check = checks[name]
        problems += check(dist / name, package)
    for package in found.values():
        if wheel_name(package) in there:
            problems += _check_requirements(dist / wheel_name(package), package)
    return problems


def _check_requirements(wheel: Path, package: Package) -> list[str]:
    """Compare the requirements of a wheel with pyproject.toml."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read(f"{package.name}-{package.version}.dist-info/METADATA"))
    built = {Requirement(text) for text in metadata.get_all("Requires-Dist", [])}
    plain = {each for each in built if "extra ==" not in str(each.marker)}
    if plain != set(requirements(package)):
        listed = ", ".join(sorted(map(str, plain)))
        return [f"{wheel.name}: asks for {listed}; build it again, pyproject.toml says otherwise"]
    return []


def _about(package: Package) -> Path:
    return package.source / "__about__.py"
