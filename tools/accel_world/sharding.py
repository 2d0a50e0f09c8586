"""`fully_shard` for tests of packages below accel, on CPUs under every version of torch."""

from __future__ import annotations

import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from accel_state.imports.packages import is_torch_version

__all__ = ["fully_shard"]


def fully_shard(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Shard a module's parameters over a mesh of CPUs.

    torch 2.6 and 2.7 cannot train there: accel completes them. Where they are tested it is installed.
    """
    if is_torch_version("<", "2.8"):
        from accel.engines.mesh.torch_compat import fully_shard as completed

        completed(module, mesh, None)
    else:
        fsdp.fully_shard(module, mesh=mesh)
