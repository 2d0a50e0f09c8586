"""Settings of tensor parallelism alone, in the manner that came before ParallelismConfig."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from accel_state.parallelism.config import ParallelismConfig
from accel_state.parallelism.handlers import check_count

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclasses.dataclass
class TorchTensorParallelPlugin:
    """Split the weights of models with a tensor-parallel plan; the same as `ParallelismConfig(tp_size=...)`.

    Args:
        tp_size: Processes of one tensor-parallel group: all that are running.
        torch_device_mesh: The mesh, with one axis called "tp"; by default it is made.

    Raises:
        TypeError: If the size is not an integer.
        ValueError: If it is below 1, or not that of the mesh.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        check_count("tp_size", self.tp_size)
        mesh = self.torch_device_mesh
        if mesh is None:
            return
        if self.tp_size == 1:
            self.tp_size = mesh.size()
        if mesh.mesh_dim_names != ("tp",) or mesh.size() != self.tp_size:
            raise ValueError(
                f"torch_device_mesh has the axes {mesh.mesh_dim_names} and {mesh.size()} processes; it needs "
                f"the one axis 'tp' of tp_size={self.tp_size}. For more axes pass a ParallelismConfig."
            )

    def complete(self, config: ParallelismConfig | None) -> ParallelismConfig:
        """The sizes of all axes, with this one among them.

        Args:
            config: The sizes that are given too, if any.

        Raises:
            ValueError: If they have another tp_size.
        """
        found = ParallelismConfig(tp_size=self.tp_size) if config is None else config
        if found.tp_size != self.tp_size:
            raise ValueError(
                f"torch_tp_plugin has tp_size={self.tp_size}, and parallelism_config "
                f"tp_size={found.tp_size}. Leave torch_tp_plugin out."
            )
        if self.torch_device_mesh is not None:
            found.use_device_mesh(self.torch_device_mesh)
        return found
