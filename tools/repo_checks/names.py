"""Every public name says what it is, and is listed once.

A module exports what it defines without a leading underscore, and what it imports as `from x import y as y`.
`__all__` is only allowed if it says more than that: if it is computed, or has names of another module.

The style checker sees what is written; this check imports the modules and sees what is there: lazy names,
re-exports, and names that a module promises and does not have.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from repo_checks.tree import Module, Package

__all__ = ["check_module", "check_names", "public_modules"]


def public_modules(found: Mapping[str, Package]) -> Iterator[Module]:
    """Yield the modules that have no leading underscore anywhere in their name."""
    for package in found.values():
        yield from (module for module in package.modules if "._" not in module.name)


def check_names(modules: Iterable[Module]) -> list[str]:
    """Import every module and compare what it exports with what it has."""
    problems = []
    for module in modules:
        try:
            loaded = import_module(module.name)
        except ImportError as error:
            problems.append(f"{module.path}: cannot be imported: {error}")
            continue
        problems += [f"{module.path}: {problem}" for problem in check_module(module, loaded)]
    return problems


def check_module(module: Module, loaded: ModuleType) -> Iterator[str]:
    """Yield what is wrong with the names of one imported module."""
    exported = getattr(loaded, "__all__", None)
    defined = _defined(loaded)
    if exported is None:
        for name in sorted(defined):
            yield from _undocumented(module, name, getattr(loaded, name))
        return
    written = _written_out(module.tree)
    public = defined | _reexported(module.tree)
    # A package's own file says what may be imported from the folder, which is not all that it has.
    if written and public <= set(exported) <= _assigned(module.tree) and module.path.name != "__init__.py":
        yield "__all__ repeats the public names; leave it out"
    if len(set(exported)) != len(exported):
        yield f"__all__ repeats {', '.join(sorted({name for name in exported if exported.count(name) > 1}))}"
    if not written and list(exported) != sorted(exported):  # else the style checker sorts it
        yield "the computed __all__ is not sorted"
    for name in sorted(public - set(exported)):
        yield f"{name} is public and not in __all__; add it, or give it a leading underscore"
    for name in exported:
        if not hasattr(loaded, name):
            yield f"__all__ has {name}, and the module does not"
        else:
            yield from _undocumented(module, name, getattr(loaded, name))


def _defined(loaded: ModuleType) -> set[str]:
    """Return the public functions and classes that the module itself defines."""
    return {
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == loaded.__name__
        and value.__qualname__ == name
    }


def _reexported(tree: ast.Module) -> set[str]:
    """Return the names of `from x import y as y`, which is how a re-export is written."""
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name and not alias.name.startswith("_")
    }


def _assigned(tree: ast.Module) -> set[str]:
    """Return the names that the statements of a module define, and no import."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _written_out(tree: ast.Module) -> bool:
    """Whether `__all__` is a list in the source, rather than computed."""
    return any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "__all__"
        and isinstance(node.value, (ast.List, ast.Tuple))
        for node in tree.body
    )


def _undocumented(module: Module, name: str, value: Any) -> Iterator[str]:
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return
    if value.__module__.partition(".")[0] != module.name.partition(".")[0]:
        return  # checked where it is defined, or another library's
    if not _documented(value):
        yield f"{name} has no docstring"
    if inspect.isclass(value):
        for member, attribute in vars(value).items():
            if member.startswith("_") or not _is_method(attribute):
                continue
            # A method may have its base's docstring.
            if not (inspect.getdoc(attribute) or inspect.getdoc(getattr(value, member))):
                yield f"{name}.{member} has no docstring"


def _is_method(attribute: Any) -> bool:
    return isinstance(attribute, (property, staticmethod, classmethod)) or inspect.isfunction(attribute)


def _documented(value: Any) -> bool:
    """Whether it has its own docstring; the generated one of a dataclass does not count."""
    if not inspect.isclass(value):
        return bool(inspect.getdoc(value))
    text = vars(value).get("__doc__") or ""
    generated = dataclasses.is_dataclass(value) and text.startswith(f"{value.__name__}(")
    return bool(text.strip()) and not generated
