"""What a package imports from outside is declared in its pyproject.toml, as a dependency or an extra."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from repo_checks.tree import BELOW, Import, Module, Package

__all__ = ["check_examples", "check_third_party", "extras", "requirements"]

# Where the import name is not the distribution's name, or not the one that must be installed for it.
DISTRIBUTIONS = {
    "IPython": "ipython",
    "PIL": "pillow",
    "megatron": "megatron-core",
    "sklearn": "scikit-learn",
    "torch.utils.tensorboard": "tensorboard",
    "yaml": "pyyaml",
}
# Python's own modules, those of versions newer than what runs this check (annotationlib: 3.14) among them.
STDLIB = sys.stdlib_module_names | {"annotationlib"}
# Delivered with a vendor's hardware or service, not on the package index: no extra can name them.
UNPUBLISHED = frozenset(
    {
        "google",
        "habana_frameworks",
        "msamp",
        "smdistributed",
        "torch_mlu",
        "torch_musa",
        "torch_npu",
        "torch_sdaa",
    }
)


def requirements(package: Package) -> list[Requirement]:
    """Return the package's dependencies, without its extras."""
    return [Requirement(text) for text in cast("list[str]", package.project.get("dependencies", []))]


def extras(package: Package) -> dict[str, list[Requirement]]:
    """Return the requirements of each extra."""
    table = cast("dict[str, Any]", package.project.get("optional-dependencies", {}))
    return {name: [Requirement(text) for text in texts] for name, texts in table.items()}


def check_third_party(found: Mapping[str, Package]) -> list[str]:
    """Every import from outside the repository is declared by the package that imports it."""
    return [
        problem
        for package in found.values()
        for module in package.modules
        for item in module.imports
        for problem in _check_import(found, package, module, item)
    ]


def check_examples(root: Path, found: Mapping[str, Package]) -> list[str]:
    """What the examples import comes with accel and its extra `examples`."""
    files = sorted((root / "examples").rglob("*.py"))
    here = {path.stem for path in files} | set(BELOW) | STDLIB
    listed = [each for package in found.values() for each in requirements(package)]
    declared = _names(listed + extras(found["accel"]).get("examples", []))
    return [
        f"{module.at(item.line)}: imports {item.module}, but the extra accel[examples] does not install it"
        for module in (Module(path.stem, path) for path in files)
        for item in module.imports
        if item.top not in here and canonicalize_name(DISTRIBUTIONS.get(item.top, item.top)) not in declared
    ]


def _check_import(
    found: Mapping[str, Package], package: Package, module: Module, item: Import
) -> Iterator[str]:
    if item.top in BELOW or item.top in STDLIB or item.top in UNPUBLISHED:
        return
    distribution = canonicalize_name(DISTRIBUTIONS.get(item.module) or DISTRIBUTIONS.get(item.top, item.top))
    if item.extra is not None:
        owner = found.get(item.extra_of.replace("-", "_"))
        if owner is None or distribution not in _names(extras(owner).get(item.extra, [])):
            yield (
                f"{module.at(item.line)}: says to install {item.extra_of}[{item.extra}] for {item.module}, "
                f"but there is no such extra with {distribution}"
            )
        return
    declared = _names(requirements(package)).union(*map(_names, extras(package).values()))
    if distribution not in declared:
        yield (
            f"{module.at(item.line)}: imports {item.module}, but {package.folder.name} declares "
            f"{distribution} neither as a dependency nor in an extra"
        )


def _names(listed: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in listed}
