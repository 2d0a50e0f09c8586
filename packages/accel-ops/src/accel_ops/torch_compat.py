"""Compatibility with torch since 2.6, one function for each change that several packages need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from accel_state.imports.packages import is_torch_version

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def shard_replicated(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Make a DTensor of a tensor that every process has in full, without communication.

    Args:
        full: The tensor, the same on all processes, on the device of the mesh.
        mesh: The processes.
        placements: The placement on each axis of the mesh: replicated or sharded.

    Returns:
        A DTensor of the same global shape.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    if is_torch_version(">=", "2.7"):
        return distribute_tensor(full, mesh, placements, src_data_rank=None)
    # torch 2.6 has no src_data_rank, and its distribute_tensor sends the first process's tensor. Going from
    # replicas to shards needs no communication.
    replicas = DTensor.from_local(full.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    sharded = replicas.redistribute(mesh, placements)
    sharded.requires_grad_(full.requires_grad)
    return sharded
