"""The total norm of gradients that are on several meshes, or on none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from accel.parallel.filling import local

__all__ = ["Sets", "gradients_of", "local_gradients", "norm_of_sets", "scale", "total_norm"]

Sets = list[tuple[list[torch.Tensor], list[dist.ProcessGroup]]]
"""This process's parts of gradients, each list with the groups over which they are parts."""


def gradients_of(parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    """The gradients that there are."""
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def local_gradients(gradients: Iterable[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    """This process's parts, by device; changing them changes the gradients."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        part = local(gradient)
        found.setdefault(part.device, []).append(part)
    return found


@torch.no_grad()
def scale(gradients: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply gradients in place."""
    for device, parts in local_gradients(gradients).items():
        own = factor.to(device, non_blocking=True) if isinstance(factor, torch.Tensor) else factor
        torch._foreach_mul_(parts, own)


@torch.no_grad()
def total_norm(gradients: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The norm of all gradients as one vector: each element counts once, wherever it lies.

    Parts are gathered by the mesh and the axes that they are sharded over; each such set costs one small
    reduction per axis.

    Args:
        gradients: Plain and sharded tensors.
        norm_type: The p of the p-norm; infinity for the maximum.
        device: Where the result is.
    """
    sets: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        gradient = _without_partial(gradient)
        sets.setdefault(_axes(gradient), []).append(local(gradient))
    return norm_of_sets(
        [
            (parts, [] if key is None else [key[0].get_group(axis) for axis in key[1]])
            for key, parts in sets.items()
        ],
        norm_type,
        device,
    )


@torch.no_grad()
def norm_of_sets(sets: Sets, norm_type: float, device: torch.device) -> torch.Tensor:
    """The norm of this process's parts of gradients, and of the others' parts.

    Args:
        sets: Parts, each with the process groups over which they are parts. All processes of a group have the
            same sets, in the same order, none of them empty, and first parts of one dtype.
        norm_type: The p of the p-norm; infinity for the maximum.
        device: Where the result is.
    """
    norm_type = float(norm_type)
    is_max = norm_type == float("inf")
    totals = [torch.zeros((), device=device)]
    for parts, groups in sets:
        filled = [part for part in parts if part.numel()]
        precise = torch.promote_types(parts[0].dtype, torch.float32)
        norm = torch.zeros((), device=device, dtype=precise)
        if filled:
            norm = torch.nn.utils.get_total_norm(filled, norm_type).to(device, precise)
        norm = norm if is_max else norm**norm_type
        for group in groups:
            dist.all_reduce(norm, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        totals.append(norm)
    joined = torch.stack(totals)
    return joined.max() if is_max else joined.sum() ** (1.0 / norm_type)


def _axes(gradient: torch.Tensor) -> Any:
    if not isinstance(gradient, DTensor):
        return None
    mesh = gradient.device_mesh
    sharded = (axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return mesh, tuple(axis for axis in sharded if mesh.size(axis) > 1)


def _without_partial(gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, DTensor) and any(isinstance(item, Partial) for item in gradient.placements):
        return gradient.redistribute(
            placements=[Replicate() if isinstance(item, Partial) else item for item in gradient.placements]
        )
    return gradient
