"""One mesh object for all parameters that lie alike.

torch (2.13) makes up to two mesh objects for each parameter that is sharded over replicas or beside tensor
parallelism, and each lists all ranks of the world. Kept for each, they are memory that grows with the world,
and comparisons of these lists in every operation.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel.engines.mesh.fsdp2_private import sharded_parameters


class SharedMeshes:
    """The mesh objects that stay: the first of those that are equal."""

    def __init__(self) -> None:
        # torch's meshes are equal where their ranks, axes and device type are.
        self._known: dict[DeviceMesh, DeviceMesh] = {}

    def deduplicate_meshes(self, module: FSDPModule) -> None:
        """Replace what is equal to a mesh that is known, in the parameters that a module shards by itself.

        Names of torch's attributes do not matter: what another version keeps otherwise stays as it is.
        """
        for parameter in sharded_parameters(module):
            for name, value in vars(parameter).items():
                if isinstance(value, DeviceMesh):
                    setattr(parameter, name, self._shared(value))
                    continue  # a mesh's own attribute `mesh` is a tensor of all its ranks, computed anew
                # Private in torch: where a DTensor has its mesh.
                layout = value._spec if isinstance(value, DTensor) else value
                mesh = getattr(layout, "mesh", None)
                if isinstance(mesh, DeviceMesh) and mesh is not self._shared(mesh):
                    layout.mesh = self._shared(mesh)

    def _shared(self, mesh: DeviceMesh) -> DeviceMesh:
        return self._known.setdefault(mesh, mesh)
