"""The documented interface: which of its names are there, and how those that are there differ from it."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from repo_checks.signatures import differences

__all__ = ["Entry", "api_entries", "client_entries", "is_missing", "mismatches"]

ABSENT = object()


@dataclass(frozen=True)
class Entry:
    """One documented name: `module`, the attributes to follow from there, and what is documented of it."""

    module: str
    attributes: tuple[str, ...]
    kind: str = ""  # "class", "function", "method", "static method", "property", "setting", "enum", "member"
    documented: str = ""  # the signature, or the enum member's value
    bases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The full dotted name."""
        return ".".join((self.module, *self.attributes))


def api_entries(api: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[Entry]:
    """Yield every module's names, and the members of its classes, from the table of the documentation."""
    for module, names in api.items():
        for name, facts in names.items():
            signature = facts.get("init", facts.get("signature", ""))
            yield Entry(module, (name,), facts["kind"], signature, tuple(facts.get("bases", ())))
            for member, text in facts.get("members", {}).items():
                kind, documented = _member(facts["kind"], text)
                yield Entry(module, (name, member), kind, documented)


def client_entries(text: str) -> Iterator[Entry]:
    """Yield the names that well-known clients import, from the list's section UNION."""
    section = text.split("## UNION", 1)[1].split("##", 1)[0]
    for line in filter(None, section.splitlines()):
        place, _, names = line.partition(": ")
        for name in names.split(", "):
            if place == "(attribute use)":
                yield Entry("accel", tuple(name.split(".")[1:]))
            else:
                module = place.replace("accelerate", "accel", 1)
                yield Entry(module, () if name == "<module>" else (name,))


def is_missing(entry: Entry) -> bool:
    """Whether the name is not there."""
    return _resolve(entry)[1] is ABSENT


def mismatches(entry: Entry) -> list[str]:
    """Say how a name that is there differs from what is documented of it."""
    owner, value = _resolve(entry)
    if _is_stub(value) or _is_stub(_static(owner, entry)):
        return [f"{entry.name}: only raises NotImplementedError; take it out"]
    return [f"{entry.name}: {difference}" for difference in _differences(entry, owner, value)]


def _member(kind: str, text: str) -> tuple[str, str]:
    if kind == "enum":
        return "member", text
    if text.startswith("property"):
        return ("setting" if "settable" in text else "property"), ""
    if text.startswith("staticmethod "):
        return "static method", text.removeprefix("staticmethod ")
    return "method", text


def _resolve(entry: Entry) -> tuple[Any, Any]:
    """Return the owner of the last attribute, and its value or ABSENT."""
    owner: Any
    value: Any
    try:
        owner = value = import_module(entry.module)
    except ImportError:  # that a module cannot be imported is for the names check to say
        return None, ABSENT
    for attribute in entry.attributes:
        owner = value
        value = getattr(owner, attribute, ABSENT)
        if value is ABSENT:
            return owner, ABSENT
    return owner, value


def _static(owner: Any, entry: Entry) -> Any:
    """Look the attribute up without calling a property."""
    return inspect.getattr_static(owner, entry.attributes[-1], None) if entry.attributes else None


def _is_stub(value: Any) -> bool:
    """Whether its body only raises NotImplementedError."""
    if isinstance(value, property):
        return _is_stub(value.fget)
    if inspect.isclass(value):
        return "__init__" in vars(value) and _is_stub(vars(value)["__init__"])
    function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
    if not inspect.isfunction(function) or getattr(function, "__isabstractmethod__", False):
        return False
    return function.__code__.co_firstlineno in _stub_lines(function.__code__.co_filename)


@functools.cache
def _stub_lines(file: str) -> frozenset[int]:
    """Return the first lines of the file's functions that only raise NotImplementedError."""
    path = Path(file)
    if not path.is_file():
        return frozenset()
    return frozenset(
        min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _only_raises(node)
    )


def _only_raises(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    first = body[0] if body else None
    return isinstance(first, ast.Raise) and "NotImplementedError" in ast.unparse(first)


def _differences(entry: Entry, owner: Any, value: Any) -> list[str]:
    if entry.kind == "member":
        return [] if value.value == entry.documented else [f"is {value.value!r}, not {entry.documented!r}"]
    if entry.kind in ("property", "setting"):
        return _property_differences(entry, owner)
    if entry.kind == "class":
        if not inspect.isclass(value):
            return [f"is {type(value).__name__}, documented as a class"]
        ancestors = {ancestor.__name__ for ancestor in value.__mro__}
        lost = [f"does not derive from {base}" for base in entry.bases if base not in ancestors]
        return lost + (_call_differences(entry, value) if entry.documented else [])
    if entry.kind == "static method" and not isinstance(_static(owner, entry), staticmethod):
        return ["is not a static method"]
    return _call_differences(entry, value) if entry.documented else []


def _property_differences(entry: Entry, owner: Any) -> list[str]:
    attribute = _static(owner, entry)
    if inspect.isfunction(attribute):
        return ["is a method, documented as a property"]
    if entry.kind == "setting" and isinstance(attribute, property) and attribute.fset is None:
        return ["cannot be set"]
    return []


def _call_differences(entry: Entry, value: Any) -> list[str]:
    if not callable(value):
        return [f"is {type(value).__name__}, documented as callable"]
    if entry.documented == "(...)":  # a built-in's constructor, whose arguments are not documented
        return []
    return differences(entry.documented, inspect.signature(value))
