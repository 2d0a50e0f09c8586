"""How the processes of a run are arranged: data, tensor, context and sequence parallelism over one mesh.

Axes, outermost first:
    dp_replicate  full replicas of the model
    dp_shard      processes that shard one replica
    cp            context parallel: shards of a sequence, attention by exchange of keys and values
    sp            sequence parallel: shards of a sequence, attention by exchange of heads
    tp            tensor parallel: shards of each weight
Flattened axes:
    dp            dp_replicate x dp_shard: processes that see different samples
    dp_shard_cp   dp_shard x cp: what FSDP shards over
    dp_cp         dp_replicate x dp_shard x cp: what the loss is averaged over
torch is imported where a mesh is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from accel_state.env.fields import from_env, read_environment
from accel_state.logging.warning import warn
from accel_state.parallelism.handlers import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    check_choice,
    check_count,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "DeepSpeedSequenceParallelConfig",
    "ParallelismConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
]

# The order fixes which ranks are neighbours: those of the last axis have consecutive ranks.
_AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


@dataclasses.dataclass
class ParallelismConfig:
    """Sizes of the mesh's axes, and the settings of each kind of parallelism.

    A size or backend left at None is read from its PARALLELISM_CONFIG_* variable; without one a size is 1.
    With every size 1 there is no mesh, and all processes are data-parallel.

    Args:
        dp_replicate_size: Full replicas of the model.
        dp_shard_size: Processes that shard one replica.
        tp_size: Processes of one tensor-parallel group.
        cp_size: Processes of one context-parallel group.
        cp_backend: Implementation of context parallelism: "torch".
        sp_size: Processes of one sequence-parallel group.
        sp_backend: Implementation of sequence parallelism: "deepspeed".
        tp_handler: Settings of tensor parallelism.
        cp_handler: Settings of context parallelism.
        sp_handler: Settings of sequence parallelism.

    Raises:
        TypeError: If a size is not an integer, or a handler not of its class.
        ValueError: If a size is below 1, a backend unknown, both cp_size and sp_size are above 1, or a fixed
            sequence length does not divide by sp_size.
    """

    dp_replicate_size: int | None = from_env("PARALLELISM_CONFIG_DP_REPLICATE_SIZE")
    dp_shard_size: int | None = from_env("PARALLELISM_CONFIG_DP_SHARD_SIZE")
    tp_size: int | None = from_env("PARALLELISM_CONFIG_TP_SIZE")
    cp_size: int | None = from_env("PARALLELISM_CONFIG_CP_SIZE")
    cp_backend: Literal["torch"] | None = from_env("PARALLELISM_CONFIG_CP_BACKEND")
    sp_size: int | None = from_env("PARALLELISM_CONFIG_SP_SIZE")
    sp_backend: Literal["deepspeed"] | None = from_env("PARALLELISM_CONFIG_SP_BACKEND")
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    def __post_init__(self) -> None:
        read_environment(self)
        for axis in _AXES:
            check_count(f"{axis}_size", self._size(axis))
        check_choice("cp_backend", self.cp_backend)
        check_choice("sp_backend", self.sp_backend)
        # After the environment has been read, which may have set the other one.
        if self.cp_enabled and self.sp_enabled:
            raise ValueError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size}: both split the sequence, and only one "
                "of them can. Set the other to 1."
            )
        self._set_handlers()
        self._mesh: DeviceMesh | None = None
        self._flattened: dict[str, DeviceMesh] = {}

    def _set_handlers(self) -> None:
        self.tp_handler = self._handler("tp", self.tp_handler, TorchTensorParallelConfig)
        self.cp_handler = self._handler("cp", self.cp_handler, TorchContextParallelConfig)
        self.sp_handler = self._handler("sp", self.sp_handler, DeepSpeedSequenceParallelConfig)
        # A fixed length is checked now; a variable one is checked with each batch.
        length = self.sp_handler and self.sp_handler.sp_seq_length
        if length and length % self._size("sp"):
            raise ValueError(
                f"sp_seq_length={length} does not divide by sp_size={self.sp_size}: "
                f"{length} / {self.sp_size} leaves {length % self._size('sp')} tokens. Pad the sequences."
            )

    def _handler(self, axis: str, user_handler: Any, kind: type[Any]) -> Any:
        if user_handler is not None and not isinstance(user_handler, kind):
            raise TypeError(f"{axis}_handler must be a {kind.__name__}, not {user_handler!r}.")
        # A handler for an axis of one process would have no effect.
        if self._size(axis) == 1:
            if user_handler is not None:
                warn(f"{axis}_handler is ignored, because {axis}_size is 1.")
            return user_handler
        return kind() if user_handler is None else user_handler

    # Sizes and names

    def _size(self, axis: str) -> int:
        size: int = getattr(self, f"{axis}_size")
        return size

    def _enabled(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._size(axis) > 1]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there is more than one replica."""
        return self._size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether a replica is sharded."""
        return self._size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether there is tensor parallelism."""
        return self._size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether there is context parallelism."""
        return self._size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether there is sequence parallelism."""
        return self._size("sp") > 1

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of the axes of more than one process, in mesh order."""
        return self._enabled(*_AXES)

    @property
    def dp_dim_names(self) -> list[str]:
        """Names of the active data-parallel axes: those flattened into "dp"."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Names of the active axes that are not data-parallel."""
        return self._enabled("cp", "sp", "tp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Names of the active axes flattened into "dp_shard_cp"."""
        return self._enabled("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Names of the active axes flattened into "dp_cp"."""
        return self._enabled("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Names of the axes that FSDP runs over: dp_replicate if active (hybrid sharding), dp_shard_cp."""
        return [*self._enabled("dp_replicate"), *(["dp_shard_cp"] if self.dp_shard_cp_dim_names else [])]

    @property
    def data_parallel_size(self) -> int:
        """Processes that see different samples."""
        return self._size("dp_replicate") * self._size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Processes that work on the same samples."""
        return self._size("cp") * self._size("sp") * self._size("tp")

    @property
    def total_size(self) -> int:
        """Processes that the configuration needs."""
        return self.data_parallel_size * self.non_data_parallel_size

    def to_json(self) -> dict[str, Any]:
        """Return all fields as a dictionary that `json.dumps` takes; the mesh is left out."""
        # Fields only: _mesh and _flattened are not fields, and a mesh has no JSON.
        return dataclasses.asdict(self)

    # The mesh

    def validate(self, world_size: int) -> None:
        """Check that the axes cover all processes.

        Args:
            world_size: Number of processes that are running.

        Raises:
            ValueError: If the product of the sizes is another number (unless every size is 1).
        """
        # Every size 1 is the configuration of plain data parallelism, on any number of processes.
        if self.total_size in (1, world_size):
            return
        product = " * ".join(f"{axis}({self._size(axis)})" for axis in self.active_mesh_dims)
        running = "1 process is" if world_size == 1 else f"{world_size} processes are"
        raise ValueError(
            f"{product} = {self.total_size}, but {running} running. Change a size of the ParallelismConfig, "
            f"or start {self.total_size} processes."
        )

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Build the mesh of the active axes, and the flattened axes; every process must call it.

        The process group is joined first if necessary.

        Args:
            device_type: Type of the devices, e.g. "cuda" or "cpu".

        Returns:
            The mesh, also kept for `get_device_mesh`; None when every size is 1.

        Raises:
            ValueError: If the sizes do not multiply to the number of processes.
        """
        if not self.active_mesh_dims:
            return None
        # On first use, as this module works without torch.
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            # On first use, as it imports torch.
            from accel_state.process.state import PartialState

            PartialState(cpu=device_type == "cpu")
        self.validate(dist.get_world_size() if dist.is_initialized() else 1)
        # Axes of one process are left out: each would cost a process group.
        shape = tuple(self._size(axis) for axis in self.active_mesh_dims)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=tuple(self.active_mesh_dims))
        self._keep_mesh(mesh)
        return mesh

    def use_device_mesh(self, mesh: DeviceMesh) -> None:
        """Use an existing mesh instead of building one.

        Args:
            mesh: The mesh; its axes are the active ones.

        Raises:
            ValueError: If its axes have other names or sizes.
        """
        names = mesh.mesh_dim_names or ()
        sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
        if list(names) != self.active_mesh_dims or sizes != [self._size(name) for name in names]:
            needed = ", ".join(f"{name}({self._size(name)})" for name in self.active_mesh_dims)
            raise ValueError(
                f"The mesh has the axes {names} of {sizes} processes, and the ParallelismConfig needs "
                f"{needed or 'none'}. Pass one of the two."
            )
        self._keep_mesh(mesh)

    def _keep_mesh(self, mesh: DeviceMesh) -> None:
        flat = {
            "dp": self.dp_dim_names,
            "dp_shard_cp": self.dp_shard_cp_dim_names,
            "dp_cp": self.dp_cp_dim_names,
        }
        # Private, but torch has no public way to flatten axes that keeps the flattened mesh by name (2.13).
        self._flattened = {name: mesh[tuple(axes)]._flatten(name) for name, axes in flat.items() if axes}
        self._mesh = mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh, built on the first call, which every process must make.

        Args:
            device_type: Type of the devices; by default the mesh's, or that of this process's device.

        Returns:
            The mesh; None when every size is 1.

        Raises:
            ValueError: If the mesh is built already for another type, or cannot be built.
        """
        if self._mesh is None:
            return self.build_device_mesh(device_type or _current_device_type())
        if device_type not in (None, self._mesh.device_type):
            raise ValueError(
                f"The mesh has been built for {self._mesh.device_type!r}, so it cannot be returned for "
                f"{device_type!r}. Call build_device_mesh({device_type!r}) to replace it."
            )
        return self._mesh

    def get_submesh(self, names: Sequence[str]) -> DeviceMesh:
        """Return a submesh, also of flattened axes.

        Args:
            names: Active or flattened axes, outermost first, e.g. `fsdp_dim_names`.

        Returns:
            The mesh of these axes that this process is in.

        Raises:
            ValueError: If no mesh can have an axis of these.
        """
        mesh = self.get_device_mesh()
        allowed = [*self.active_mesh_dims, *self._flattened]
        # Both kinds of names: the user need not know which axes are flattened.
        unknown = [name for name in names if name not in allowed]
        if mesh is None or unknown or not names:
            raise ValueError(f"No mesh has the axes {list(names)}: active and flattened axes are {allowed}.")
        submeshes = [self._flattened[name] if name in self._flattened else mesh[name] for name in names]
        if len(submeshes) == 1:
            return submeshes[0]
        # Private, but torch announces that flattened axes will not be sliced from the root (2.10 to 2.15).
        return type(mesh)._concatenate(submeshes)

    def __getstate__(self) -> dict[str, Any]:
        # A mesh belongs to the process that built it.
        return {**self.__dict__, "_mesh": None, "_flattened": {}}


def _current_device_type() -> str:
    from accel_state.process.state import current_process

    return current_process().device.type
