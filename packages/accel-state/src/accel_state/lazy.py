"""Lazy exports of a package (PEP 562): each public name comes with its module, on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["attach"]


def attach(
    package: str, names: Mapping[str, Iterable[str]], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make what a package's `__init__` needs to export names without importing their modules.

    Args:
        package: The package's `__name__`.
        names: Per module (its full name), the names that it exports.
        submodules: Submodules that become attributes on first use.

    Returns:
        `__getattr__`, `__dir__` and `__all__` (sorted), to be assigned in the package.
    """
    module_of = {name: module for module, exported in names.items() for name in exported}
    parts = frozenset(submodules)

    def get(name: str) -> Any:
        if name in module_of:
            value = getattr(import_module(module_of[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        if name in parts:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *parts})

    return get, listed, sorted(module_of)
