"""Encode values of common types in states as plain values, so that a file loads with `weights_only`.

    ("accel_ckpt.value", kind, content)     encodes a value, such as a Path or a member of an Enum

Enums, namedtuples and dataclasses are looked up by name in modules that are already imported. Nothing is
imported for a file, and neither their constructors nor other methods are called.
"""

from __future__ import annotations

import dataclasses
import io
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import torch

from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import tensors
from accel_ops.trees.walk import is_namedtuple, rebuild

_TAG = "accel_ckpt.value"
_PLAIN = {type(None), bool, int, float, str, bytes, bytearray, torch.Size, torch.dtype, torch.device}
_MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple, Counter, OrderedDict)
}

# For each type its kind in a file, the function that encodes a value, and the one that decodes it.
_KINDS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    date: ("date", date.isoformat, date.fromisoformat),
    datetime: (
        "datetime",
        lambda value: (value.replace(tzinfo=None, fold=0).isoformat(), value.fold, value.tzinfo),
        lambda it: datetime.fromisoformat(it[0]).replace(fold=it[1], tzinfo=it[2]),
    ),
    time: (
        "time",
        lambda value: (value.replace(tzinfo=None, fold=0).isoformat(), value.fold, value.tzinfo),
        lambda it: time.fromisoformat(it[0]).replace(fold=it[1], tzinfo=it[2]),
    ),
    timedelta: (
        "timedelta",
        lambda value: (value.days, value.seconds, value.microseconds),
        lambda it: timedelta(*it),
    ),
    timezone: (
        "timezone",
        lambda value: value.__getinitargs__(),  # not in its annotations
        lambda it: timezone(*it),
    ),
    ZoneInfo: ("zone", lambda value: value.key, ZoneInfo),
    Decimal: ("Decimal", str, Decimal),
    Fraction: ("Fraction", lambda value: (value.numerator, value.denominator), lambda it: Fraction(*it)),
    UUID: ("UUID", lambda value: value.hex, UUID),
    complex: ("complex", lambda value: (value.real, value.imag), lambda it: complex(*it)),
    range: ("range", lambda value: (value.start, value.stop, value.step), lambda it: range(*it)),
    slice: ("slice", lambda value: (value.start, value.stop, value.step), lambda it: slice(*it)),
    frozenset: ("frozenset", list, frozenset),
    deque: ("deque", lambda value: (list(value), value.maxlen), lambda it: deque(*it)),
    PurePosixPath: ("PurePosixPath", str, PurePosixPath),
    PureWindowsPath: ("PureWindowsPath", str, PureWindowsPath),
    # Decoded as the type of this system, whatever it was saved on.
    PosixPath: ("Path", PurePath.as_posix, Path),
    WindowsPath: ("Path", PurePath.as_posix, Path),
}


class _UnfitError(Exception):
    def __init__(self, path: tuple[Any, ...], value: Any) -> None:
        super().__init__()
        self.path, self.value = path, value


def encode(state: Any, what: str) -> Any:
    """Return a state in which other values are encoded as plain ones; the state itself if all are plain.

    Args:
        state: The result of a `state_dict`.
        what: The name of the object, for the message.

    Raises:
        ValueError: If a value has a type that no load would accept; it says where.
    """
    try:
        return _encode(state, (), {})
    except _UnfitError as error:
        place = "".join(f"[{key!r}]" for key in error.path)
        kind = type(error.value)
        way = "dataclasses.asdict(...)" if dataclasses.is_dataclass(kind) else "its attributes, or its name"
        if isinstance(error.value, torch.Tensor):
            way = ".as_subclass(torch.Tensor)"
        raise ValueError(
            f"{what} cannot be saved: its state{place} is of type {kind.__module__}.{kind.__qualname__}, "
            f"which no load would accept. Return plain values from state_dict() instead ({way}), and "
            "build the object from them in load_state_dict(); or allow the type here and in the run that "
            f"loads: torch.serialization.add_safe_globals([{kind.__qualname__}])."
        ) from None


def decode(state: Any) -> Any:
    """Return a state with the values that `encode` encoded; the state itself if there are none.

    Raises:
        CheckpointError: If a value cannot be decoded; it says which.
    """
    return _decode(state, {})


def _encode(node: Any, path: tuple[Any, ...], seen: dict[int, tuple[Any, Any]]) -> Any:
    kind = type(node)
    if kind in _PLAIN:
        return node
    # For a class that is not torch's, checking one tensor is enough.
    if isinstance(node, torch.Tensor) and (kind.__module__.partition(".")[0] == "torch" or id(kind) in seen):
        return node
    if id(node) in seen:
        return seen[id(node)][1]
    # With the node, as the id of a freed one may be reused. Itself until it is encoded, as it may contain
    # itself.
    seen[id(node)] = node, node
    seen[id(node)] = node, _encoded(node, kind, path, seen)
    return seen[id(node)][1]


def _encoded(node: Any, kind: type, path: tuple[Any, ...], seen: dict[int, tuple[Any, Any]]) -> Any:
    def all_of(values: Any, keys: Any) -> list[Any]:
        pairs = zip(values, keys, strict=True)
        return [
            value if type(value) in _PLAIN else _encode(value, (*path, key), seen) for value, key in pairs
        ]

    if kind is list or kind is tuple:
        values = all_of(node, range(len(node)))
        if kind is tuple and node and type(node[0]) is str and node[0] == _TAG:
            return _TAG, "tuple", values
        return node if _are_same(values, node) else kind(values)
    if kind in _MAPPINGS.values():
        keys, values = all_of(node, node), all_of(node.values(), node)
        if not _are_same(keys, node):
            return _TAG, kind.__name__, list(zip(keys, values, strict=True))
        return node if _are_same(values, node.values()) else rebuild(node, values)
    if kind is set:
        members = list(node)
        values = all_of(members, members)
        return node if _are_same(values, members) else (_TAG, "set", values)
    if kind in _KINDS and getattr(node, "key", "") is not None:  # a ZoneInfo from a file has no key
        name, to_plain, _ = _KINDS[kind]
        return _TAG, name, _encode(to_plain(node), path, seen)
    if kind is defaultdict and (node.default_factory is None or node.default_factory in _FACTORIES.values()):
        factory = node.default_factory and node.default_factory.__name__
        return _TAG, "defaultdict", (factory, _encode(list(node.items()), path, seen))
    if (content := _content_by_name(node, kind)) is not None:
        return _TAG, content[0], (kind.__module__, kind.__qualname__, _encode(content[1], path, seen))
    if _is_array(node) or _is_loadable(node):
        if isinstance(node, torch.Tensor):
            seen[id(kind)] = kind, kind
        return node
    raise _UnfitError(path, node)


def _content_by_name(node: Any, kind: type) -> tuple[str, Any] | None:
    """Encode an object by the name of its class, if this is its complete state."""
    if _find(kind.__module__, kind.__qualname__) is not kind:
        return None
    if isinstance(node, Enum):
        # Values change more often than names, as with auto(). A combined flag has no name to look up.
        named = node.name in kind.__members__
        return ("enum", node.name) if named else ("enum value", node.value)
    attributes = getattr(node, "__dict__", {})
    if is_namedtuple(node) and not attributes:
        return "namedtuple", list(node)
    if _is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        if attributes.keys() <= {*names} and all(hasattr(node, name) for name in names):
            return "dataclass", {name: getattr(node, name) for name in names}
    return None


def _decode(node: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    kind = type(node)
    if kind not in (list, tuple, dict, OrderedDict, Counter):
        return node
    if id(node) in seen:
        return seen[id(node)][1]
    seen[id(node)] = node, node
    children = node if kind in (list, tuple) else node.values()
    values = [value if type(value) in _PLAIN else _decode(value, seen) for value in children]
    if kind is tuple and len(node) == 3 and type(node[0]) is str and node[0] == _TAG:
        result = _construct(node[1], values[2])
    else:
        result = node if _are_same(values, children) else rebuild(node, values)
    seen[id(node)] = node, result
    return result


def _construct(kind: str, content: Any) -> Any:
    try:
        if kind in _MAPPINGS:
            return _MAPPINGS[kind](dict(content))
        if kind in ("tuple", "set"):
            return {"tuple": tuple, "set": set}[kind](content)
        if kind == "defaultdict":
            return defaultdict(content[0] and _FACTORIES[content[0]], content[1])
        if kind in ("enum", "enum value", "namedtuple", "dataclass"):
            return _construct_by_name(kind, *content)
        return next(make for name, _, make in _KINDS.values() if name == kind)(content)
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The checkpoint has a value of the kind {kind!r} that cannot be decoded: {content!r} "
            f"({type(error).__name__}: {error})."
        ) from error


def _construct_by_name(kind: str, module: str, name: str, content: Any) -> Any:
    resolved = _find(module, name)
    checks: dict[str, Callable[[Any], bool]] = {
        "enum": lambda it: issubclass(it, Enum),
        "enum value": lambda it: issubclass(it, Enum),
        "namedtuple": lambda it: issubclass(it, tuple) and hasattr(it, "_fields"),
        "dataclass": _is_dataclass,
    }
    if not isinstance(resolved, type) or not checks[kind](resolved):
        raise CheckpointError(
            f"The checkpoint has a value of the class {module}.{name}, and no imported module has such a "
            "class. Import the module before load_state, or define the class there."
        )
    cls: Any = resolved
    if kind == "enum":
        return cls.__members__[content]
    if kind == "enum value":
        return cls(content)
    if kind == "namedtuple":
        if len(content) != len(cls._fields):
            raise ValueError(f"{name} has {len(cls._fields)} fields")
        return tuple.__new__(cls, content)
    if content.keys() != {field.name for field in dataclasses.fields(cls)}:
        raise ValueError(f"{name} has other fields")
    made = object.__new__(cls)
    for field, value in content.items():
        object.__setattr__(made, field, value)  # also if the class is frozen
    return made


def _find(module: str, name: str) -> Any:
    """Look up a qualified name in an imported module, without running its code."""
    resolved: Any = sys.modules.get(module)
    for attribute in name.split("."):
        # Not getattr, which may import other modules.
        resolved = getattr(resolved, "__dict__", {}).get(attribute)
    return resolved


def _is_dataclass(kind: type) -> bool:
    # An object from a file must not run code when it is freed.
    return dataclasses.is_dataclass(kind) and not hasattr(kind, "__del__") and kind.__new__ is object.__new__


def _are_same(first: Any, second: Any) -> bool:
    return all(one is other for one, other in zip(first, second, strict=True))


def _is_array(node: Any) -> bool:
    numpy = sys.modules.get("numpy")
    # Not objects and records, whose elements may be any pickle.
    return (
        numpy is not None
        and (type(node) is numpy.ndarray or isinstance(node, numpy.generic))
        and node.dtype.kind not in "OV"
    )


def _is_loadable(node: Any) -> bool:
    """Whether a load accepts a value of another type: one of torch, or one that the user has allowed."""
    file = io.BytesIO()
    try:
        torch.save(node, file)
        file.seek(0)
        tensors.load(file)
    except Exception:  # pickling runs the object's code
        return False
    return True
