"""Moving trees of tensors to a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from accel_ops.walk import children, keys, rebuild

__all__ = ["send_to_device"]


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
    target = torch.device(device) if isinstance(device, str) else device
    skip = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
    return _send(tensor, target, non_blocking, skip)


def _send(node: Any, device: torch.device | int, non_blocking: bool, skip: frozenset[str]) -> Any:
    if isinstance(node, torch.Tensor):
        return node if node.device == device else node.to(device, non_blocking=non_blocking)
    if callable(getattr(type(node), "to", None)) and not _has_any(node, skip):
        return _send_by_method(node, device, non_blocking)
    inside = children(node)
    if inside is None:
        return node
    named: Sequence[Any] = () if not skip or isinstance(node, (list, tuple)) else keys(node)
    kept = [key in skip for key in named] or [False] * len(inside)
    sent = [
        child if keep else _send(child, device, non_blocking, skip)
        for keep, child in zip(kept, inside, strict=True)
    ]
    if all(new is old for new, old in zip(sent, inside, strict=True)):
        return node
    return rebuild(node, sent)


def _has_any(node: Any, names: frozenset[str]) -> bool:
    return bool(names) and isinstance(node, Mapping) and any(name in node for name in names)


def _send_by_method(node: Any, device: torch.device | int, non_blocking: bool) -> Any:
    if not non_blocking:
        return node.to(device)
    try:
        return node.to(device, non_blocking=True)
    except TypeError:  # its `to` knows no such argument
        return node.to(device)
