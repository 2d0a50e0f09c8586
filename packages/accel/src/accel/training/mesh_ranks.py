"""The coordinates of this process in the device mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh_rank(mesh: DeviceMesh | None, dim: str) -> int:
    """Return this process's coordinate along a dimension of the mesh.

    Args:
        mesh: The mesh.
        dim: The dimension's name.

    Raises:
        RuntimeError: If there is no mesh.
    """
    if mesh is None:
        raise RuntimeError(f"There is no {dim} rank without a mesh: pass parallelism_config to Accelerator.")
    # An axis of size 1 is not in the mesh.
    return mesh.get_local_rank(dim) if dim in (mesh.mesh_dim_names or ()) else 0
