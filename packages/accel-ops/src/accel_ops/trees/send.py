"""Moving trees of tensors to a device."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from accel_ops.trees.walk import children, keys, rebuild

# What every batch is made of is known by its type alone: looking for a method of another object is slow.
_PLAIN_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})
_SEQUENCES = frozenset({list, tuple})
_PLAIN_CONTAINERS = frozenset({list, tuple, dict})
_NOTHING: frozenset[str] = frozenset()


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Iterable[str] | None = None,
) -> Any:
    """Send every tensor of a tree to a device.

    An object that has its own `to` method (a tokenizer's batch, a packed sequence, a module) is sent
    by it. Containers in which nothing had to move are returned as they are, not copied.

    Args:
        tensor: A tree of tensors; leaves that cannot be sent are kept.
        device: Where to.
        non_blocking: Do not wait for copies from pinned memory.
        skip_keys: Keys of mappings, or fields of dataclasses, at any depth, whose values stay where
            they are.

    Returns:
        The tree with its tensors on `device`.
    """
    if type(tensor) in _SEQUENCES:  # most batches; on the CPU nothing in them has to move
        for leaf in tensor:
            if type(leaf) is not torch.Tensor or leaf.device != device:
                break
        else:
            return tensor
    # Integers stay: torch decides which accelerator they count.
    target = torch.device(device) if isinstance(device, str) else device
    if skip_keys is None:
        return _send(tensor, target, non_blocking, _NOTHING)
    skip = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys)
    return _send(tensor, target, non_blocking, skip)


def _send(node: Any, device: torch.device | int, non_blocking: bool, skip: frozenset[str]) -> Any:
    kind = type(node)
    if kind in _PLAIN_CONTAINERS:
        if _are_on_device(node.values() if kind is dict else node, device):
            return node
    elif isinstance(node, torch.Tensor):
        return node if node.device == device else node.to(device, non_blocking=non_blocking)
    elif kind in _PLAIN_LEAVES:
        return node
    # Not with skip_keys, which its method does not know.
    elif callable(getattr(kind, "to", None)) and not _has_any(node, skip):
        return _send_by_method(node, device, non_blocking)
    inside = children(node)
    if inside is None:
        return node
    if not skip or isinstance(node, (list, tuple)):
        sent = [_send(child, device, non_blocking, skip) for child in inside]
    else:
        sent = [
            child if key in skip else _send(child, device, non_blocking, skip)
            for key, child in zip(keys(node), inside, strict=True)
        ]
    # Nothing has moved: the object itself, whose class may not allow a copy.
    if all(map(operator.is_, sent, inside)):
        return node
    return rebuild(node, sent)


def _are_on_device(leaves: Iterable[Any], device: torch.device | int) -> bool:
    """Return whether nothing has to move: found quickly for most batches on the CPU."""
    kinds = set(map(type, leaves)) - _PLAIN_LEAVES  # for all at once
    if not kinds:
        return True
    if kinds != {torch.Tensor}:
        return False
    return all(leaf.device == device for leaf in leaves if type(leaf) is torch.Tensor)


def _has_any(node: Any, names: frozenset[str]) -> bool:
    return bool(names) and isinstance(node, Mapping) and any(name in node for name in names)


def _send_by_method(node: Any, device: torch.device | int, non_blocking: bool) -> Any:
    # Without the argument, which not every `to` has.
    if not non_blocking:
        return node.to(device)
    try:
        return node.to(device, non_blocking=True)
    except TypeError:  # its `to` knows no such argument
        return node.to(device)
