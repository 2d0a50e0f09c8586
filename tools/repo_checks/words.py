"""Check the glossary: no name has a word that it bans, and each of its terms names something.

docs/glossary.md has two tables. In the one under "Terms", the third column names what the term refers to: an
importable object (`accel_optim.window.Window`) or a file of the repository (`docs/seam.md`). In the one under
"Words that no name has", the first column lists the banned words.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Container, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from repo_checks.tree import Module

__all__ = [
    "banned_words",
    "check_local_words",
    "check_terms",
    "check_words",
    "kept_local_names",
    "kept_names",
]

# Public names that cannot change, each with the reason.
_KEPT = {
    "accel.engines.deepspeed.plugin.DeepSpeedPlugin.fill_match": "documented by Accelerate",
    "accel_data.resume.cursor.Cursor.part": "a key of saved loader states",
    "accel_data.resume.stream_position.StreamPosition.parts": "a key of saved loader states",
}

# Other names in a module's source that cannot change, each with the reason.
_KEPT_LOCALLY = {
    "accel.engines.deepspeed.plugin.fill_match": "documented by Accelerate",
    "accel_data.resume.cursor.part": "a key of saved loader states",
    "accel_data.resume.stream_position.parts": "a key of saved loader states",
    "accel_launch.settings.parser._fill_text": "overrides a method of argparse",
}
# The usual name of what a search returns.
_FINE_LOCALLY = {"found"}


def banned_words(glossary: str) -> set[str]:
    """Return the words of the second table."""
    rows = _rows(glossary, "Words that no name has")
    return {word for row in rows for word in re.findall(r"`(\w+)`", row[0])}


def check_terms(glossary: str, root: Path) -> list[str]:
    """Return the terms that name nothing: no importable object, and no file below `root`."""
    problems = []
    for row in _rows(glossary, "Terms"):
        if len(row) != 4:
            problems.append(f"the glossary's {row[0]!r} has {len(row)} columns instead of 4")
            continue
        term, _, places, _ = row
        names = re.findall(r"`([^`]+)`", places)
        if not names:
            problems.append(f"the glossary's {term!r} names no class, function or file")
        problems += [
            f"the glossary's {term!r} names {name}, which is not there"
            for name in names
            if not (root / name).exists() and not _is_importable(name)
        ]
    return problems


def kept_names() -> set[str]:
    """Return the public names with a banned word that cannot change."""
    return set(_KEPT)


def check_words(modules: Iterable[Module], banned: set[str], kept: Container[str] = _KEPT) -> list[str]:
    """Return the public modules, classes, functions, methods and parameters with a banned word."""
    problems = []
    for module in modules:
        for name in _public_names(module.name, import_module(module.name)):
            if name in kept:
                continue
            last = name.rpartition(".")[2]
            problems += [
                f"{module.path}: {name} has the word {word!r}; see docs/glossary.md"
                for word in sorted(_words(last) & banned)
            ]
    return problems


def kept_local_names() -> set[str]:
    """Return the names in modules that have a banned word and cannot change."""
    return set(_KEPT_LOCALLY)


def check_local_words(
    modules: Iterable[Module], banned: set[str], kept: Container[str] = _KEPT_LOCALLY
) -> list[str]:
    """Return all names that modules define with a banned word: variables, attributes and private ones too."""
    problems = []
    for module in modules:
        places: dict[str, int] = {}  # the first line of each name
        for name, line in _defined_names(module.tree):
            places[name] = min(line, places.get(name, line))
        for name, line in sorted(places.items(), key=lambda item: item[1]):
            words = sorted(_words(name) & (banned - _FINE_LOCALLY))
            if f"{module.name}.{name}" not in kept:
                problems += [
                    f"{module.at(line)}: {name} has the word {word!r}; see docs/glossary.md" for word in words
                ]
    return problems


def _rows(glossary: str, heading: str) -> list[list[str]]:
    """The rows of the table under a heading, without its first two lines."""
    section = glossary.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def _is_importable(name: str) -> bool:
    """Whether a dotted name leads to an object: a module, and attributes in it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for attribute in parts[end:]:
            # A dataclass's field without a default is no attribute.
            if not hasattr(found, attribute) and attribute not in getattr(found, "__dataclass_fields__", ()):
                return False
            found = getattr(found, attribute, None)
        return True
    return False


def _words(name: str) -> set[str]:
    """The words of a name: `GradientSync` and `parameter_owner` have the same two."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _defined_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The names that a module defines at any depth, with their lines; not those that it only uses."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname, node.lineno) for alias in node.names if alias.asname)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name, node.lineno


def _public_names(module_name: str, loaded: ModuleType) -> Iterator[str]:
    yield module_name
    for name, value in vars(loaded).items():
        is_here = getattr(value, "__module__", None) == loaded.__name__
        if name.startswith("_") or not is_here or not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        yield f"{module_name}.{name}"
        if inspect.isfunction(value):
            yield from _parameters(f"{module_name}.{name}", value)
            continue
        # Annotated fields too: one without a default is no attribute.
        members = {**dict.fromkeys(vars(value).get("__annotations__", ())), **vars(value)}
        for member, attribute in members.items():
            if member.startswith("_"):
                continue
            yield f"{module_name}.{name}.{member}"
            function = inspect.unwrap(getattr(attribute, "__func__", attribute))
            if inspect.isfunction(function):
                yield from _parameters(f"{module_name}.{name}.{member}", function)


def _parameters(name: str, function: Any) -> Iterator[str]:
    for parameter in inspect.signature(function).parameters:
        if not parameter.startswith("_"):
            yield f"{name}.{parameter}"
