"""Imports and declared dependencies between the packages point downwards, and the ranges fit."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from repo_checks.declared import requirements
from repo_checks.tree import BELOW, Package

__all__ = ["check_imports", "check_ranges"]


def check_imports(found: Mapping[str, Package]) -> list[str]:
    """Every import of a sibling, at any depth, is of a layer below and declared."""
    problems = []
    for package in found.values():
        declared = {canonicalize_name(each.name) for each in requirements(package)}
        for module in package.modules:
            for item in module.imports:
                if item.top not in BELOW or item.top == package.name:
                    continue
                if item.top not in BELOW[package.name]:
                    problems.append(f"{module.at(item.line)}: {package.name} may not import {item.top}")
                elif item.top.replace("_", "-") not in declared:
                    missing = item.top.replace("_", "-")
                    problems.append(
                        f"{module.at(item.line)}: {item.top} is imported, and {missing} is not among the "
                        f"dependencies of {package.folder.name}"
                    )
    return problems


def check_ranges(found: Mapping[str, Package]) -> list[str]:
    """Declared siblings are of layers below, and each range admits the sibling's present version."""
    problems = []
    for package in found.values():
        for requirement in requirements(package):
            sibling = found.get(requirement.name.replace("-", "_"))
            if sibling is None:
                continue
            problems += _check_requirement(package, requirement, sibling)
    return problems


def _check_requirement(package: Package, requirement: Requirement, sibling: Package) -> list[str]:
    where = f"{package.folder / 'pyproject.toml'}: {requirement}"
    if sibling.name not in BELOW[package.name]:
        return [f"{where}: {package.name} may not depend on {sibling.name}"]
    if not requirement.specifier:
        return [f"{where}: give a compatible range, such as >=0.1,<0.2"]
    if not requirement.specifier.contains(sibling.version, prereleases=True):
        return [f"{where}: does not admit the present version {sibling.version}"]
    return []
