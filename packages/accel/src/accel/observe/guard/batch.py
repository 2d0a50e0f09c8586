"""A batch as values that a file can hold without code: tensors, numbers and text in plain containers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from accel_ops.trees.send import send_to_device
from accel_ops.trees.walk import children, keys, rebuild


class BatchError(ValueError):
    """A batch cannot be rebuilt."""


def encode(tree: Any) -> dict[str, Any]:
    """Turn a batch into plain values; tensors are copied to the CPU.

    Anything but tensors, arrays, numbers, text and containers of these is left out; its type is recorded.
    """
    if isinstance(tree, torch.Tensor):
        # Cloned: a view would be saved with all that it is a view of.
        return {"tensor": tree.detach().cpu().clone(), "device": tree.device.type}
    # Exact types: an enumeration, for one, is an int and would come back as a plain one.
    if tree is None or type(tree) in (bool, int, float, str, bytes):
        return {"value": tree}
    numpy = sys.modules.get("numpy")
    # numpy's letters for booleans, integers with and without a sign, and floats.
    if numpy is not None and isinstance(tree, numpy.ndarray) and tree.dtype.kind in "biuf":
        return {"array": torch.from_numpy(tree.copy())}
    inside = children(tree)
    if inside is None:
        return {"left_out": type(tree).__qualname__}
    kind = type(tree).__name__ if type(tree) in (dict, list, tuple) else _name(tree)
    named = keys(tree) if not isinstance(tree, (list, tuple)) else None
    return {"kind": kind, "keys": named, "values": [encode(item) for item in inside]}


def decode(coded: dict[str, Any], template: Any, device: torch.device) -> Any:
    """Rebuild a batch.

    Args:
        coded: What `encode` returned.
        template: A batch of the same loader, for containers of other types than dict, list and tuple.
        device: Where tensors go that were on an accelerator.

    Raises:
        BatchError: If a value was left out, or a container has no template.
    """
    if "tensor" in coded:
        return coded["tensor"] if coded["device"] == "cpu" else send_to_device(coded["tensor"], device)
    if "array" in coded:
        return coded["array"].numpy()
    if "value" in coded:
        return coded["value"]
    if "left_out" in coded:
        raise BatchError(f"the batch has a {coded['left_out']}, which a bundle cannot hold")
    values = [decode(item, template, device) for item in coded["values"]]
    kind = coded["kind"]
    if kind == "dict":
        return dict(zip(coded["keys"], values, strict=True))
    if kind in ("list", "tuple"):
        return values if kind == "list" else tuple(values)
    found = _find(template, coded)
    if found is None:
        raise BatchError(f"the loader's batches have no {kind} like the one in the bundle")
    return rebuild(found, values)


def _name(tree: Any) -> str:
    return f"{type(tree).__module__}.{type(tree).__qualname__}"


def _find(template: Any, coded: dict[str, Any]) -> Any:
    """The first container of the template that is of the same type and has the same keys."""
    inside = children(template)
    if inside is None:
        return None
    if _name(template) == coded["kind"] and (
        keys(template) == coded["keys"]
        if isinstance(template, Mapping)
        else len(inside) == len(coded["values"])
    ):
        return template
    return next((found for item in inside if (found := _find(item, coded)) is not None), None)
