"""Padding: to one size over the processes, and to a size that divides among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from accel_ops.collectives.checks import require_group, require_plain
from accel_ops.debug import check_collectives
from accel_ops.trees.walk import flatten, recursively_apply
from accel_state.logging.warning import warn
from accel_state.process.info import ProcessInfo
from accel_state.process.state import current_process

_T = TypeVar("_T")


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor cannot be padded across processes, and is returned unchanged."""


def pad_across_processes(
    tensor: _T,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    process: ProcessInfo | None = None,
) -> _T:
    """Pad the tensors of all processes to the largest size along a dimension, so that they can be gathered.

    The sizes of the full tree are exchanged in one collective.

    Args:
        tensor: A tree of tensors, of the same structure on every process. Nested tensors come back as they
            are, with a `CannotPadNestedTensorWarning`.
        dim: The dimension; tensors that do not have it come back as they are.
        pad_index: The value to pad with.
        pad_first: Pad at the beginning and not at the end.
        process: This process; the current one by default.

    Returns:
        The tree; a tensor that has the largest size already is the same object.

    Raises:
        TypeError: If a leaf is not a tensor, or is a DTensor, sparse or quantized.
        RuntimeError: If the process group has been destroyed.
        DistributedOperationException: In debug mode, if the processes disagree.
    """
    process = process or current_process()
    rebuild: Callable[[Sequence[torch.Tensor]], _T]
    leaves, rebuild = flatten(tensor, required_by="pad_across_processes")
    padded = [i for i, leaf in enumerate(leaves) if _has_dim(leaf, dim)]
    require_plain("pad_across_processes", tensor, [leaf for leaf in leaves if not leaf.is_nested])
    if process.world_size == 1:
        return tensor
    if process.debug:
        detail = f"dim={dim}"
        check_collectives.check("pad_across_processes", tensor, process=process, detail=detail, shapes=False)
    require_group("pad_across_processes", process)
    # The sizes of all leaves, in one collective.
    sizes = torch.tensor([leaves[i].shape[dim] for i in padded], dtype=torch.int64, device=process.device)
    # The same on every process, as trees of one structure are requested.
    if padded:
        dist.all_reduce(sizes, dist.ReduceOp.MAX)
    for i, size in zip(padded, sizes.tolist(), strict=True):
        leaves[i] = _pad(leaves[i], dim, size, pad_index, pad_first)
    return rebuild(leaves)


def _has_dim(leaf: torch.Tensor, dim: int) -> bool:
    if leaf.is_nested:
        warn(
            "pad_across_processes cannot pad a nested tensor, which is returned unchanged. Pass its values, "
            "or pad it with to_padded_tensor() first.",
            CannotPadNestedTensorWarning,
        )
        return False
    return -leaf.dim() <= dim < leaf.dim()


def _pad(leaf: torch.Tensor, dim: int, size: int, value: float, first: bool) -> torch.Tensor:
    have = leaf.shape[dim]
    if have == size:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = size
    padded = leaf.new_full(shape, value)
    padded.narrow(dim, size - have if first else 0, have).copy_(leaf)
    return padded


def pad_input_tensors(tensor: _T, batch_size: int, num_processes: int, dim: int = 0) -> _T:
    """Repeat the last entry of a batch until the batch divides among the processes.

    Args:
        tensor: A tree of tensors; those with `batch_size` entries along `dim` are padded.
        batch_size: Entries in the batch.
        num_processes: What the padded size is a multiple of.
        dim: The dimension of the batch.

    Returns:
        The tree.

    Raises:
        ValueError: If there are no processes, or nothing to repeat.
    """
    if num_processes < 1 or batch_size < 1:
        raise ValueError(
            f"pad_input_tensors: batch_size={batch_size}, num_processes={num_processes}; both must be at "
            "least 1."
        )
    missing = -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if not missing or not -leaf.dim() <= dim < leaf.dim() or leaf.shape[dim] != batch_size:
            return leaf
        # A real entry, and not zeros: a model must be able to compute with it.
        last = leaf.narrow(dim, batch_size - 1, 1)
        return torch.cat([leaf, *[last] * missing], dim)

    padded: _T = recursively_apply(pad, tensor)
    return padded
