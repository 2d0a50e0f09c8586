"""What torch changed since 2.6 that more than one package meets: one function for each change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from accel_state.imports.packages import is_torch_version

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def shard_replicated(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Cut this process's part out of a whole tensor that every process has; nothing is sent.

    Args:
        whole: The tensor, the same on all processes, on the device of the mesh.
        mesh: The processes.
        placements: How the tensor lies on each axis of the mesh: replicated or sharded.

    Returns:
        A DTensor of the whole one's shape.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    if is_torch_version(">=", "2.7"):
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    # torch 2.6 has no src_data_rank, and its distribute_tensor sends the first process's tensor. Going from
    # replicas to shards cuts without sending.
    replicas = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    part = replicas.redistribute(mesh, placements)
    part.requires_grad_(whole.requires_grad)
    return part
