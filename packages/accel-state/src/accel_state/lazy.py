"""Lazy exports of a package (PEP 562): each public name is imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make what a package's `__init__` needs to export names without importing their modules.

    Type checkers and this function read one list: the stub `__init__.pyi` next to the package's
    `__init__.py`, of lines `from module import name as name`. A name that it imports from the package itself
    is a submodule.

    Args:
        package: The package's `__name__`.
        file: The package's `__file__`.

    Returns:
        `__getattr__`, `__dir__` and `__all__` (sorted), to be assigned in the package.
    """
    module_of, submodules = {}, set()
    # Split as text: ast and pathlib would take most of a launcher's start-up time.
    with open(f"{file}i", encoding="utf-8") as stub:
        statements = f"\n{stub.read()}".split("\nfrom ")[1:]
    for statement in statements:
        module, _, exported = statement.partition(" import ")
        names = [item.split()[0] for item in exported.strip("() \n").split(",") if item.strip()]
        if module == package:
            submodules.update(names)
        else:
            module_of.update(dict.fromkeys(names, module))

    def get(name: str) -> Any:
        if name in module_of:
            value = getattr(import_module(module_of[name]), name)
            # From now on the name is found without this function.
            setattr(sys.modules[package], name, value)
            return value
        # An import sets it on the package by itself.
        if name in submodules:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *submodules})

    return get, listed, sorted(module_of)
