"""The total norm of gradients on several meshes, or on none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate

from accel.engines.common.gradients import multiply
from accel.engines.common.layouts import local
from accel_ops.collectives import waits

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ShardSets = list[tuple[list[torch.Tensor], list[dist.ProcessGroup]]]
"""This process's shards of gradients, each list with the groups over which they are sharded."""


def scale(gradients: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply this process's shards of gradients in place."""
    multiply(map(local, gradients), factor)


@torch.no_grad()
def total_norm(gradients: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The norm of all gradients as one vector: each element counts once, on whichever process it is.

    Args:
        gradients: Plain and sharded tensors.
        norm_type: The p of the p-norm; infinity for the maximum.
        device: Where the result is.
    """
    sets: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        # No operation of torch takes tensors of several meshes, or plain tensors with DTensors.
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        sets.setdefault(key, []).append(gradient)
    return norm_of_sets([_shards(key, items) for key, items in sets.items()], norm_type, device)


@torch.no_grad()
def norm_of_sets(sets: ShardSets, norm_type: float, device: torch.device) -> torch.Tensor:
    """The norm of the shards of gradients on all processes.

    Groups of the same processes need one small reduction; norms that need none are computed meanwhile.

    Args:
        sets: Shards, each with the process groups over which they are sharded. All processes of a group have
            the same sets, in the same order, none of them empty, and first shards of one dtype.
        norm_type: The p of the p-norm; infinity for the maximum.
        device: Where the result is.
    """
    norm_type = float(norm_type)
    is_max = norm_type == float("inf")
    totals: dict[int, torch.Tensor] = {}

    def total(index: int) -> torch.Tensor:
        if index not in totals:
            totals[index] = _total(sets[index][0], norm_type, device)
        return totals[index]

    # Meshes of the same processes have separate groups; one is enough.
    ranks = {group: tuple(dist.get_process_group_ranks(group)) for _, groups in sets for group in groups}
    for joint in dict.fromkeys(ranks.values()):
        group = next(group for group, members in ranks.items() if members == joint)
        split = [index for index, (_, groups) in enumerate(sets) if joint in [ranks[item] for item in groups]]
        joined = torch.stack([total(index) for index in split])
        operation = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        # Asynchronous: sums of gradients that need no reduction are computed while it travels.
        work = dist.all_reduce(joined, operation, group=group, async_op=True)
        for index in range(len(sets)):  # while waiting for the other ranks
            total(index)
        waits.wait(work)
        totals.update(zip(split, joined.unbind(), strict=True))
    # A zero, to stack something even if no process has a gradient.
    joined = torch.stack([torch.zeros((), device=device), *(total(index) for index in range(len(sets)))])
    return joined.max() if is_max else joined.sum() ** (1.0 / norm_type)


def _total(shards: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The sum of the p-th powers of all elements; for infinity their maximum."""
    filled = [shard for shard in shards if shard.numel()]
    # Squares of half-precision gradients overflow from 256 on (fp16), or lose small ones (bf16).
    precise = torch.promote_types(shards[0].dtype.to_real(), torch.float32)
    if not filled:
        return torch.zeros((), device=device, dtype=precise)
    if norm_type == 2.0 and all(_is_vector(shard) for shard in filled):
        squares = [torch.dot(flat, flat) for flat in (shard.view(-1) for shard in filled)]
        return torch.stack(squares).sum().to(device, precise)
    norm = torch.nn.utils.get_total_norm(filled, norm_type).to(device, precise)
    return norm if norm_type == float("inf") else norm**norm_type


def _is_vector(shard: torch.Tensor) -> bool:
    """Whether torch.dot accepts it, which takes two thirds of the time of a norm on the CPU."""
    return shard.is_cpu and shard.dtype in (torch.float32, torch.float64) and shard.is_contiguous()


def _shards(
    key: tuple[DeviceMesh, Sequence[Placement]] | None, gradients: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[dist.ProcessGroup]]:
    """This process's shards of gradients with one layout, and the groups over which they are sharded."""
    if key is None:
        return gradients, []
    mesh, placements = key
    # Partial gradients are summands, whose norms do not add up.
    if any(item.is_partial() for item in placements):
        reduced = [Replicate() if item.is_partial() else item for item in placements]
        gradients = [cast("DTensor", gradient).redistribute(placements=reduced) for gradient in gradients]
    axes = [axis for axis, item in enumerate(placements) if not (item.is_replicate() or item.is_partial())]
    return [local(item) for item in gradients], [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]
