"""Queries and simple operations on trees of tensors: batch size, device, structure, slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from accel_ops.trees.walk import children, find_path, is_torch_tensor, keys, rebuild, recursively_apply


@dataclasses.dataclass(frozen=True)
class TensorInformation:
    """Shape and dtype of a tensor, to make an empty one like it."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether `tensor_info` is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """Replace every tensor of a tree by its `TensorInformation`.

    Args:
        data: A tree of tensors; other leaves are kept.

    Returns:
        The tree that `initialize_tensors` turns into empty tensors.
    """
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Replace every `TensorInformation` of a tree by an uninitialised tensor on the CPU.

    Args:
        data_structure: What `get_data_structure` returned.

    Returns:
        The tree with tensors whose values are not defined.
    """
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def find_batch_size(data: Any) -> int:
    """Return the size of dimension 0 of the first tensor of a tree that has a dimension.

    Args:
        data: A tree of tensors.

    Returns:
        The batch size.

    Raises:
        TypeError: If there is no tensor, only objects of other types.
        ValueError: If there is nothing in `data`, or all its tensors are 0-dimensional.
    """
    # The usual batches, without a search: statistics look at each batch of a run.
    first = data
    if type(data) in (list, tuple):
        first = data[0] if data else None
    elif type(data) is dict:
        first = next(iter(data.values()), None)
    if isinstance(first, torch.Tensor) and first.dim():
        return int(first.shape[0])
    match = find_path(data, lambda node: isinstance(node, torch.Tensor) and node.dim() > 0)
    if match:
        return int(match[1].shape[0])
    # There are tensors, only none with a dimension: another mistake than none at all.
    if find_path(data, is_torch_tensor):
        raise ValueError("No batch size: every tensor in data is 0-dimensional. Give it a first dimension.")
    other = find_path(data, lambda node: children(node) is None)
    if other:
        raise TypeError(f"No batch size: {other[0]} is a {type(other[1]).__name__}, and there is no tensor.")
    raise ValueError(f"No batch size: there is no tensor in the empty {type(data).__name__}.")


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return `find_batch_size(data)`, or None where there is no batch size."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor of a tree; None if there is no tensor."""
    match = find_path(data, is_torch_tensor)
    return match[1].device if match else None


def listify(data: Any) -> Any:
    """Replace every tensor of a tree by the nested lists of its numbers (0-dim: by its number)."""
    return recursively_apply(lambda tensor: tensor.tolist(), data)


def slice_tensors(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> Any:
    """Take the same slice of the first dimension of every tensor of a tree.

    Args:
        data: A tree; 0-dimensional tensors and non-tensor leaves are kept.
        tensor_slice: The slice.
        process_index: Not used here; a custom slicing function of a dispatching loader gets it.
        num_processes: Not used here; a custom slicing function of a dispatching loader gets it.

    Returns:
        The tree of slices (views of the tensors).
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice] if tensor.dim() else tensor, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate trees of one structure, tensor by tensor.

    Args:
        data: A list or tuple of trees of the same structure.
        dim: The dimension along which to concatenate. 0-dimensional tensors become one element each
            of a 1-dimensional result.

    Returns:
        A tree of that structure with the concatenated tensors.

    Raises:
        TypeError: If a leaf is not a tensor.
        ValueError: If `data` is empty, or the trees differ in structure.
    """
    if len(data) == 0:
        raise ValueError("concatenate got an empty sequence; give it at least one tree of tensors.")
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([_at_least_1d(tensor) for tensor in data], dim=dim)
    if children(first) is None:
        _at_least_1d(first)  # raises
    # Before any column is concatenated: one that fails alone would not say that the trees differ.
    if any(type(tree) is not type(first) or set(keys(tree)) != set(keys(first)) for tree in data):
        seen = ", ".join(f"{type(tree).__name__} with {keys(tree)}" for tree in data)
        raise ValueError(f"Only trees of one structure can be concatenated, but these are: {seen}")
    rows = [_in_order_of(keys(first), tree) for tree in data]
    return rebuild(first, [concatenate(column, dim) for column in zip(*rows, strict=True)])


def _at_least_1d(leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(f"Only tensors can be concatenated, but there is a {type(leaf).__name__}: {leaf!r}")
    return leaf if leaf.dim() else leaf.reshape(1)


def _in_order_of(names: Sequence[Any], tree: Any) -> Sequence[Any]:
    values = children(tree)
    assert values is not None
    # Mappings may have the same keys in another order.
    by_name = dict(zip(keys(tree), values, strict=True))
    return [by_name[name] for name in names]
