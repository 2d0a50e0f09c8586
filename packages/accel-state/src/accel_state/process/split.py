"""Splitting sequences into contiguous slices, one per process."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping, Sequence
from copy import copy
from typing import Any

import torch


def shard_range(length: int, rank: int, size: int, padded: bool = False) -> range:
    """Return the positions that belong to one process.

    Args:
        length: Number of elements.
        rank: The process.
        size: Number of processes.
        padded: Give every process as many as the first has; positions then run past `length - 1`.

    Returns:
        Contiguous positions, in rank order. Unpadded, their numbers differ by at most one, and the first
        ranks have more.
    """
    each, extra = divmod(length, size)
    if padded:
        each += extra > 0
        return range(rank * each, (rank + 1) * each)
    # The ranks before this one: the first `extra` ranks have one element more.
    start = rank * each + min(rank, extra)
    return range(start, start + each + (rank < extra))


def split(inputs: Any, rank: int, size: int, apply_padding: bool = False) -> Any:
    """Return one process's slice of the inputs.

    Args:
        inputs: A list, tuple, range, tensor, NumPy array or `datasets.Dataset`, or a dictionary of such (also
            nested) of one length.
        rank: The process.
        size: Number of processes.
        apply_padding: Repeat the last element at the end, so that all slices are equally long.

    Returns:
        The slice, of the type of the inputs; the inputs themselves when there is one process.

    Raises:
        TypeError: If the inputs are of another type.
        ValueError: If the values of a dictionary differ in length, or a tensor has no dimension.
    """
    # By the path of each value, for the message.
    lengths = dict(_lengths(inputs, "inputs"))
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise ValueError(
            "The values of a dictionary are split in the same way, so they need one length, but there are: "
            f"{listed}. Make them equally long, or split them one by one."
        )
    # After the lengths, so that what fails on many processes fails on one too.
    if size == 1 or not lengths:
        return inputs
    length = next(iter(lengths.values()))
    return _take(inputs, shard_range(length, rank, size, apply_padding and length > 0), length)


def _lengths(inputs: Any, name: str) -> list[tuple[str, int]]:
    if isinstance(inputs, MutableMapping):
        return [entry for key, value in inputs.items() for entry in _lengths(value, f"{name}[{key!r}]")]
    if isinstance(inputs, torch.Tensor) and inputs.ndim == 0:
        raise ValueError(
            f"{name} is a tensor without dimensions, which cannot be split; give it one (unsqueeze(0))."
        )
    if not (isinstance(inputs, (list, tuple, range)) or _takes_indices(inputs)):
        raise TypeError(
            f"{name} is of type {type(inputs).__name__}, which cannot be split between processes; allowed: "
            "list, tuple, range, torch.Tensor, numpy.ndarray, datasets.Dataset, and dictionaries of these."
        )
    return [(name, len(inputs))]


def _take(inputs: Any, positions: range, length: int) -> Any:
    if isinstance(inputs, MutableMapping):
        taken = copy(inputs)  # of the same type, with its other attributes
        for key, value in inputs.items():
            taken[key] = _take(value, positions, length)
        return taken
    if positions.stop <= length:
        return _select(inputs, range(positions.start, positions.stop))
    # Positions beyond the end are padding: the last element again.
    return _select(inputs, [min(position, length - 1) for position in positions])


def _select(inputs: Any, positions: Sequence[int]) -> Any:
    if _is_dataset(inputs):
        return inputs.select(positions or [])  # an empty range that begins at the end is out of range there
    if isinstance(positions, range):
        # A slice keeps the type, and makes a view of a tensor or an array.
        return inputs[positions.start : positions.stop]
    if isinstance(inputs, (list, tuple, range)):
        taken = [inputs[position] for position in positions]
        return tuple(taken) if isinstance(inputs, tuple) else taken
    return inputs[positions]


def _takes_indices(inputs: Any) -> bool:
    return isinstance(inputs, torch.Tensor) or _is_instance(inputs, "numpy", "ndarray") or _is_dataset(inputs)


def _is_dataset(inputs: Any) -> bool:
    return _is_instance(inputs, "datasets", "Dataset")


def _is_instance(value: Any, module: str, name: str) -> bool:
    # A value can only be of a type whose module is loaded: nothing is imported to find out.
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)
