"""One mesh object for all parameters with the same layout.

torch (2.13) creates up to two mesh objects per parameter with replicas or tensor parallelism, and each lists
all ranks of the world. That takes memory that grows with the world, and every operation compares the lists.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel.engines.mesh.fsdp2_private import sharded_parameters
from accel.engines.torch_private import layout_of


class SharedMeshes:
    """The mesh objects that are kept: the first of each set of equal ones."""

    def __init__(self) -> None:
        # torch's meshes are equal where their ranks, axes and device type are.
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}

    def deduplicate_meshes(self, module: FSDPModule) -> None:
        """Replace meshes by known equal ones in the parameters of a module.

        This does not depend on the names of torch's attributes: unknown structures are left alone.
        """
        for parameter in sharded_parameters(module):
            for name, value in vars(parameter).items():
                if isinstance(value, DeviceMesh):
                    setattr(parameter, name, self._shared(value))
                    continue  # not its attribute `mesh`, a tensor of all its ranks that is computed on access
                layout = layout_of(value) if isinstance(value, DTensor) else value
                mesh = getattr(layout, "mesh", None)
                if isinstance(mesh, DeviceMesh) and mesh is not self._shared(mesh):
                    layout.mesh = self._shared(mesh)

    def _shared(self, mesh: DeviceMesh) -> DeviceMesh:
        return self._meshes.setdefault(mesh, mesh)
