"""How data is split between the processes of an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class JoinState:
    """Whether torch's Join is active now; shared by loaders and their engine."""

    active: bool = False


class Loaders:
    """Every process has its own data; created on each access.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def dp_rank_and_size(self) -> tuple[int, int]:
        """(rank, size) along the data-parallel dimension, over which loaders are sharded: all processes."""
        process = self.engine.context.process
        # Loaders read only this, `data_ranks` and `mesh` from an engine.
        return process.rank, process.world_size

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh, if there is one."""
        mesh: DeviceMesh | None = self.engine.context.mesh
        return mesh

    @property
    def data_ranks(self) -> list[int] | None:
        """Each process's rank along that dimension, unless it is its global rank or follows from the mesh."""
        return None

    def loader_to_prepare(self, loader: Any) -> Any:
        """The loader to prepare instead of the given one."""
        return loader

    extra_types: tuple[type, ...] = ()
    """Additional types of objects that `prepare` accepts under this engine."""

    def prepare_extra(self, item: Any, accelerator: Any) -> Any:
        """Prepare an object of `extra_types`, for an Accelerator."""
        raise NotImplementedError

    def wrap_loader(self, loader: Any) -> Any:
        """Wrap a prepared loader whose model was prepared in the same call."""
        return loader

    def context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: AbstractSet[torch.Tensor] | None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which each process of a group has its shard of each sequence; no-op without groups.

        Args:
            buffers: Tensors with one entry per token.
            dims: The token dimension of each.
            no_restore: Buffers that keep the shard afterwards.
        """
        return contextlib.nullcontext()

    @property
    def join_state(self) -> JoinState | None:
        """Whether `join` is active; None if `join` does nothing, of which its user is warned."""
        return None

    def join(self, joinables: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """A context for training on uneven inputs; no-op where backward runs no collectives."""
        return contextlib.nullcontext()
