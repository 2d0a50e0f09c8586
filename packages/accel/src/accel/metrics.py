"""gather_for_metrics: every sample once, in the global order."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.collectives import gather
from accel_ops.objects import gather_object
from accel_ops.tree import is_torch_tensor, recursively_apply

if TYPE_CHECKING:
    from accel_state.process import Process

__all__ = ["gather_for_metrics"]


def gather_for_metrics(
    data: Any,
    *,
    loader: Any | None,
    process: Process,
    shard: tuple[int, int],
    use_gather_object: bool = False,
) -> Any:
    """Gather `data` from all processes and drop the rows that only padded the batch of `loader`.

    A padded batch has the same number of rows on every process, and the loader knows how many of them are
    real samples on each. Objects are cut before they travel and tensors, whose sizes must agree, after.

    Args:
        data: A tree of tensors (rows, *), or any objects.
        loader: The prepared loader being iterated, else None: then nothing is dropped.
        process: This process.
        shard: (rank, size) of this process among the data-parallel ones.
        use_gather_object: Gather by pickling although all leaves are tensors.

    Returns:
        The tree with rows of all processes in rank order; for objects the flat list over the processes.
    """
    counts: tuple[int, ...] | None = getattr(loader, "real_samples", None)
    rows: int = getattr(loader, "batch_rows", None) or 0
    if use_gather_object or not _holds_only_tensors(data):
        if counts is not None:
            data = _cut_objects(data, counts[shard[0]], rows)
        return gather_object(data, process=process)
    gathered = gather(data, process=process)
    if counts is None or process.world_size != len(counts):
        return gathered
    return recursively_apply(_drop_padding, gathered, counts, rows)


def _holds_only_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _drop_padding(gathered: torch.Tensor, counts: tuple[int, ...], rows: int) -> torch.Tensor:
    """Keep the first counts[rank] of each rank's `rows` rows; what is not one row per sample stays whole."""
    if gathered.shape[0] != rows * len(counts):
        if gathered.shape[0] != len(counts):
            warnings.warn(
                f"gather_for_metrics got {gathered.shape[0]} rows from {len(counts)} processes in a padded "
                f"batch of "
                f"{rows} rows each: it cannot tell which rows belong to padding and keeps all. Return one "
                f"row per "
                "sample to have the padding dropped.",
                UserWarning,
                stacklevel=2,
            )
        return gathered
    if len(set(counts)) == 1 and counts[0] == rows:
        return gathered
    pieces = [gathered[rank * rows : rank * rows + count] for rank, count in enumerate(counts) if count]
    return torch.cat(pieces)


def _cut_objects(data: Any, count: int, rows: int) -> Any:
    """Cut the lists and tensors of `data` that have one entry per sample to the real samples."""
    if is_torch_tensor(data) and data.dim() > 0 and data.shape[0] == rows:
        return data[:count]
    if isinstance(data, list) and len(data) == rows:
        return data[:count]
    if isinstance(data, dict):
        return type(data)((key, _cut_objects(value, count, rows)) for key, value in data.items())
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        return type(data)(_cut_objects(value, count, rows) for value in data)
    return data
