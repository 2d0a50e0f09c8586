"""Walking nested data: what counts as a container, and how a changed copy of one is made.

A *tree* is any nesting of dict, list and tuple (with their subclasses), namedtuple, Mapping and
dataclass instances. Everything else is a leaf. Types, key order and extra attributes are kept.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether `tensor` is a `torch.Tensor` (or an instance of a subclass)."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: Any) -> bool:
    """Return whether `data` is an instance of a namedtuple class."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Make a sequence of the same type as `obj` from the items of `generator`.

    Args:
        obj: A list, tuple or namedtuple, or an instance of a subclass. Attributes that a list
            subclass carries are kept.
        generator: The new items.

    Returns:
        The new sequence; `obj` is not changed.
    """
    items = list(generator)
    # _make, as a namedtuple's constructor takes its fields one by one.
    if is_namedtuple(obj):
        return type(obj)._make(items)
    if isinstance(obj, list) and type(obj) is not list:
        new = copy.copy(obj)
        # In a copy, which keeps the attributes of a subclass.
        new[:] = items
        return new
    return type(obj)(items)


def children(data: Any) -> Sequence[Any] | None:
    """Return the values directly inside the container `data`, in order; None for a leaf."""
    kind = type(data)
    # Exact types first: this is called for every node, and isinstance with Mapping is slow.
    if kind is list or kind is tuple:
        return data  # type: ignore[no-any-return]
    if kind is dict:
        return list(data.values())
    if isinstance(data, (list, tuple)):
        return data
    if isinstance(data, Mapping):
        return [data[key] for key in data]
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return [getattr(data, name) for name in _field_names(data)]
    return None


def keys(data: Any) -> list[Any]:
    """Return the names of `children(data)`: mapping keys, dataclass fields or positions."""
    if isinstance(data, (list, tuple)):
        return list(range(len(data)))
    return list(data) if isinstance(data, Mapping) else _field_names(data)


def rebuild(data: Any, values: Sequence[Any]) -> Any:
    """Return a copy of the container `data` with `values` in place of its children.

    Args:
        data: A container, that is, `children(data)` is not None.
        values: The new children, in the order of `children(data)`.

    Returns:
        A container of the same type. Dataclass instances are copied without running `__init__`, so
        frozen classes and fields with `init=False` work. `data` is not changed.
    """
    if type(data) is dict:
        return dict(zip(data, values, strict=True))
    if type(data) is tuple:
        return tuple(values)
    if isinstance(data, (list, tuple)):
        return honor_type(data, values)
    if isinstance(data, Mapping):
        return _rebuild_mapping(data, values)
    new = copy.copy(data)
    for name, value in zip(_field_names(data), values, strict=True):
        object.__setattr__(new, name, value)  # also where the class is frozen
    return new


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func` to every leaf of `data` that passes `test_type`.

    Args:
        func: Called as `func(leaf, *args, **kwargs)`.
        data: A tree. An object that passes `test_type` is a leaf even if it is a container.
        *args: Passed on to `func`.
        test_type: Returns whether `func` is applied to an object; by default tensors.
        error_on_other_type: Raise on a leaf that does not pass `test_type`, instead of keeping it.
        **kwargs: Passed on to `func`.

    Returns:
        A tree of the same structure with the results.

    Raises:
        TypeError: If `error_on_other_type` is True and a leaf does not pass `test_type`.
    """
    return _apply(data, data, func, test_type, error_on_other_type, args, kwargs)


# A function inside another one that calls itself would be a cycle, and keep the tensors that it saw until
# the garbage collector runs.
def _apply(
    node: Any,
    root: Any,
    func: Callable[..., Any],
    test_type: Callable[[Any], bool],
    strict: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if test_type(node):
        return func(node, *args, **kwargs)
    inside = children(node)
    if inside is not None:
        values = [_apply(child, root, func, test_type, strict, args, kwargs) for child in inside]
        return rebuild(node, values)
    if strict:
        name = getattr(func, "__name__", type(func).__name__)
        raise TypeError(_unsupported(name, root, test_type))
    return node


def flatten(
    tree: Any, *, required_by: str | None = None
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """Take the tensors out of a tree.

    Args:
        tree: A tree of tensors and of other objects.
        required_by: Name of an operation that can handle tensors only; a leaf of another type then
            raises. By default such leaves are kept as they are.

    Returns:
        The tensors in order, and a function that takes as many tensors and returns a tree of the
        same structure with those in their places.

    Raises:
        TypeError: If `required_by` is given and a leaf is not a tensor.
    """
    plain = plain_tensors(tree)
    if plain is not None:
        return plain, partial(rebuild, tree)
    leaves: list[torch.Tensor] = []
    _collect(tree, tree, leaves, required_by)
    return leaves, lambda tensors: _replace(tree, iter(tensors))


def plain_tensors(tree: Any) -> list[torch.Tensor] | None:
    """Return the tensors of a plain batch, for which no walk is needed.

    Args:
        tree: A tree.

    Returns:
        The values of a dict, list or tuple, no subclass, if each of them is a tensor, no subclass; else None.
    """
    kind = type(tree)
    if kind is not dict and kind is not list and kind is not tuple:
        return None
    inside = list(tree.values() if kind is dict else tree)
    return inside if _all_tensors(inside) else None


def _collect(node: Any, root: Any, leaves: list[torch.Tensor], required_by: str | None) -> None:
    if isinstance(node, torch.Tensor):
        leaves.append(node)
        return
    inside = children(node)
    if inside is not None:
        if _all_tensors(inside):
            leaves.extend(inside)
            return
        for child in inside:
            _collect(child, root, leaves, required_by)
    elif required_by is not None:
        raise TypeError(_unsupported(required_by, root, is_torch_tensor))


def find_path(data: Any, test: Callable[[Any], bool], path: str = "data") -> tuple[str, Any] | None:
    """Find the first leaf for which `test` holds.

    Args:
        data: A tree. An object for which `test` holds is a leaf even if it is a container.
        test: Called with each leaf.
        path: The name of the root.

    Returns:
        The place, written as code (`data['a'][0]`), and the leaf; None if there is none.
    """
    if test(data):
        return path, data
    inside = children(data)
    named = not isinstance(data, (list, tuple, Mapping))
    for key, child in zip(keys(data), inside, strict=True) if inside is not None else ():
        match = find_path(child, test, f"{path}.{key}" if named else f"{path}[{key!r}]")
        if match:
            return match
    return None


def _replace(node: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        return next(tensors)
    inside = children(node)
    if inside is None:
        return node
    if _all_tensors(inside):
        return rebuild(node, list(islice(tensors, len(inside))))
    return rebuild(node, [_replace(child, tensors) for child in inside])


def _all_tensors(values: Sequence[Any]) -> bool:
    """Return, for many at once, whether all are tensors; False may be wrong (for other tensor classes)."""
    return set(map(type, values)) == {torch.Tensor}


def _field_names(data: Any) -> list[str]:
    # A field with init=False may not have been set yet.
    return [field.name for field in dataclasses.fields(data) if hasattr(data, field.name)]


def _rebuild_mapping(data: Mapping[Any, Any], values: Sequence[Any]) -> Any:
    # copy.copy of a mapping that is not a dict and has no __copy__ would share its inner storage.
    if not isinstance(data, dict) and not hasattr(type(data), "__copy__"):
        return type(data)(dict(zip(data, values, strict=True)))  # type: ignore[call-arg]
    new: Any = copy.copy(data)
    for key, value in zip(list(data), values, strict=True):
        new[key] = value
    return new


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge one dict into another, recursively.

    Args:
        source: What is merged; where both have a value, this one counts.
        destination: What it is merged into, in place.

    Returns:
        The destination.

    Example:
        >>> merge_dicts({"a": {"x": 1}}, {"a": {"y": 2}, "b": 3})
        {'a': {'y': 2, 'x': 1}, 'b': 3}
    """
    for key, value in source.items():
        existing = destination.get(key)
        if isinstance(value, dict):
            value = merge_dicts(value, existing if isinstance(existing, dict) else {})
        destination[key] = value
    return destination


def _unsupported(operation: str, data: Any, test_type: Callable[[Any], bool]) -> str:
    match = find_path(data, lambda node: not test_type(node) and children(node) is None)
    path, value = match if match else ("data", data)
    return (
        f"{operation} takes nested dicts, lists, tuples, mappings and dataclasses of objects for which "
        f"{getattr(test_type, '__name__', test_type)} holds, but {path} is {_short_text(value)}. Remove it, "
        "or make it a tensor."
    )


def _short_text(value: Any) -> str:
    text = repr(value)
    return f"of type {type(value).__name__}: {text if len(text) <= 60 else text[:57] + '...'}"
