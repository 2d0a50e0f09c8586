"""The modules that a launcher reads can be imported without torch, whatever they import in turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch

from repo_checks.tree import BELOW, Import, Module, Package

__all__ = ["PATTERNS", "check_torch_free"]

PATTERNS = (
    "accel_launch",
    "accel_launch.*",
    "accel_state",
    "accel_state.enums",
    "accel_state.env*",
    "accel_state.process.failure",
    "accel_state.handlers",
    "accel_state.imports.available",
    "accel_state.logging.loggers",
    "accel_state.parallelism.config",
    "accel_state.logging.warning",
)
LIGHT = frozenset({"packaging", "yaml"})  # the only third-party modules they may load


def check_torch_free(found: Mapping[str, Package]) -> list[str]:
    """No torch-free module loads a third-party module other than the light ones, directly or not."""
    modules = {module.name: module for package in found.values() for module in package.modules}
    problems = []
    for name, module in modules.items():
        if any(fnmatch(name, pattern) for pattern in PATTERNS):
            chain = _heavy_chain(module, modules, set())
            if chain:
                problems.append(f"{module.path}: must load without torch, but loads {' -> '.join(chain)}")
    return problems


def _heavy_chain(module: Module, modules: Mapping[str, Module], seen: set[str]) -> list[str]:
    """Follow what loading the module loads; return the way to the first heavy module, if any."""
    seen.add(module.name)
    for item in module.imports:
        if item.when != "loading":
            continue
        if item.top not in BELOW:
            if item.top not in sys.stdlib_module_names and item.top not in LIGHT:
                return [item.module]
            continue
        for name in _loaded_by(item, modules):
            if name not in seen:
                chain = _heavy_chain(modules[name], modules, seen)
                if chain:
                    return [name, *chain]
    return []


def _loaded_by(item: Import, modules: Mapping[str, Module]) -> Iterator[str]:
    """Name the modules that one import statement loads: the parents, itself, and what lazy names bring."""
    parts = item.module.split(".")
    yield from (name for end in range(1, len(parts) + 1) if (name := ".".join(parts[:end])) in modules)
    package = modules.get(item.module)
    for name in item.names:
        if f"{item.module}.{name}" in modules:
            yield f"{item.module}.{name}"
        elif package is not None:
            yield from _lazy_source(package, name, modules)


def _lazy_source(package: Module, name: str, modules: Mapping[str, Module]) -> Iterator[str]:
    """Find where a lazily exported name comes from: packages say it to type checkers."""
    for item in package.imports:
        if item.when == "typing" and name in item.names and item.module in modules:
            yield item.module
