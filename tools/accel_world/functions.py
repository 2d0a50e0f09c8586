"""Name a test function in one process and find it in another, by file path and qualified name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from _pytest.assertion.rewrite import rewrite_asserts

__all__ = ["FunctionName", "find_function", "name_function"]

RULE = "world.run takes a function defined at the top level of a module (no lambda, closure or method)"

_file_versions: dict[str, tuple[int, int]] = {}  # module name -> (mtime_ns, size) when imported by path


@dataclass(frozen=True)
class FunctionName:
    """Where a module-level function is defined."""

    module: str
    path: str
    qualname: str
    rewritten: bool = False  # whether pytest rewrote the module's asserts to say what was compared

    def __str__(self) -> str:
        return f"{os.path.basename(self.path)}::{self.qualname}"


def name_function(function: Callable[..., Any]) -> FunctionName:
    """Name `function` so that another process can find it.

    Raises:
        TypeError: If it is not a function at the top level of a module.
    """
    qualname = getattr(function, "__qualname__", None)
    if qualname is None or not callable(function):
        raise TypeError(f"{RULE}; got {function!r}. Define a function in the test file and pass its name.")
    if "<lambda>" in qualname or "<locals>" in qualname:
        raise TypeError(
            f"{RULE}; got {qualname!r}. Move it to the top level of the test file and pass what it needs "
            "as arguments."
        )
    module = sys.modules.get(function.__module__)
    path = getattr(module, "__file__", None)
    if path is None or _attribute(module, qualname) is None:
        raise TypeError(f"{RULE}; {function.__module__}.{qualname} cannot be found by that name.")
    return FunctionName(
        function.__module__, os.path.realpath(path), qualname, rewritten="@pytest_ar" in vars(module)
    )


def find_function(name: FunctionName) -> Callable[..., Any]:
    """Import the function's module (again, if its file changed) and return the function."""
    function: Callable[..., Any] = _attribute(_import(name), name.qualname)
    return function


def _attribute(owner: Any, qualname: str) -> Any:
    for part in qualname.split("."):
        owner = getattr(owner, part, None)
    return owner


def _import(name: FunctionName) -> ModuleType:
    if _importable(name):
        return importlib.import_module(name.module)
    status = os.stat(name.path)
    version = (status.st_mtime_ns, status.st_size)
    if _file_versions.get(name.module) != version:
        _import_by_path(name)
        _file_versions[name.module] = version
    return sys.modules[name.module]


def _importable(name: FunctionName) -> bool:
    """Whether a plain import gives the same module, which is so for libraries and not for test files."""
    if name.rewritten or name.module in _file_versions:
        return False
    try:
        spec = importlib.util.find_spec(name.module)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == name.path


def _import_by_path(name: FunctionName) -> None:
    spec = importlib.util.spec_from_file_location(name.module, name.path)
    assert spec is not None
    _provide_parents(name)
    module = importlib.util.module_from_spec(spec)
    tree = ast.parse(Path(name.path).read_bytes(), name.path)
    rewrite_asserts(tree, Path(name.path).read_bytes(), name.path)
    sys.modules[name.module] = module
    try:
        exec(compile(tree, name.path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name.module]
        raise


def _provide_parents(name: FunctionName) -> None:
    """Create the packages of a dotted name, which pickle needs; pytest derives the names from folders."""
    parts = name.module.split(".")[:-1]
    folders = [str(folder) for folder in Path(name.path).parents]
    for depth in range(1, len(parts) + 1):
        parent = ".".join(parts[:depth])
        try:
            importlib.import_module(parent)
        except ImportError:
            package = sys.modules[parent] = ModuleType(parent)
            package.__path__ = [folders[len(parts) - depth]]
