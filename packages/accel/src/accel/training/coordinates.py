"""Where this process stands in the device mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel.training.run import Run
    from accel_state.parallelism.config import ParallelismConfig


class MeshCoordinates:
    """Mixin with the mesh of a parallelism configuration, and this process's coordinates in it.

    A subclass has the attributes that are declared here.
    """

    run: Run

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the mesh dimensions, when they were given."""
        return cast("ParallelismConfig | None", self.run.state.parallelism_config)

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh of the parallelism config, or the one that the engine made, else None."""
        return self.run.engine.loaders.mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP version 2 is the engine."""
        return bool(self.run.state.is_fsdp2)

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether the engine works on mesh dimensions that compose."""
        return bool(self.run.state.is_fsdp2)

    @property
    def data_parallel_rank(self) -> int:
        """This process's coordinate along dp_replicate.

        Raises:
            RuntimeError: If there is no mesh.
        """
        return self._coordinate("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process's coordinate along dp_shard.

        Raises:
            RuntimeError: If there is no mesh.
        """
        return self._coordinate("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's coordinate along tp.

        Raises:
            RuntimeError: If there is no mesh.
        """
        return self._coordinate("tp")

    @property
    def context_parallel_rank(self) -> int:
        """This process's coordinate along cp.

        Raises:
            RuntimeError: If there is no mesh.
        """
        return self._coordinate("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This process's coordinate along pp.

        Raises:
            RuntimeError: If there is no mesh.
        """
        return self._coordinate("pp")

    def _coordinate(self, dim: str) -> int:
        mesh = self.torch_device_mesh
        if mesh is None:
            raise RuntimeError(
                f"There is no {dim} rank without a mesh: pass parallelism_config to Accelerator."
            )
        # An axis of size 1 is not in the mesh.
        return mesh.get_local_rank(dim) if dim in (mesh.mesh_dim_names or ()) else 0
