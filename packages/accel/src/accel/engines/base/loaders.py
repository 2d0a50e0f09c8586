"""How an engine's processes share data: the fourth part of the engine interface."""

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
class Joining:
    """Whether processes that are out of data are shadowed now; loaders share it with their engine."""

    active: bool = False


class Loaders:
    """Data of its own for each process; made anew whenever it is asked for.

    Args:
        engine: Whose processes share the data.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def data_shard(self) -> tuple[int, int]:
        """(rank, size) along the data-parallel dimension, by which loaders are sharded: all processes."""
        process = self.engine.context.process
        # Along with `data_ranks` and `mesh` this is all that loaders know of an engine.
        return process.rank, process.world_size

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh, where processes are arranged in one."""
        mesh: DeviceMesh | None = self.engine.context.mesh
        return mesh

    @property
    def data_ranks(self) -> list[int] | None:
        """The rank along that dimension of each process, where it is neither its own nor said by the mesh."""
        return None

    def loader_to_prepare(self, loader: Any) -> Any:
        """The loader whose batches are sharded, in place of one that is to be prepared."""
        return loader

    own_kinds: tuple[type, ...] = ()
    """Types of objects that this engine alone prepares."""

    def prepare_own(self, item: Any, caller: Any) -> Any:
        """The prepared form of an object of `own_kinds`, for an Accelerator."""
        raise NotImplementedError

    def share_loader(self, loader: Any) -> Any:
        """A prepared loader as it feeds a model that was prepared in the same call."""
        return loader

    def context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: AbstractSet[torch.Tensor] | None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which each process of a group has its part of sequences; nothing without such groups.

        Args:
            buffers: Tensors with one entry per token.
            dims: Their dimensions of tokens.
            no_restore: Those that keep the part afterwards.
        """
        return contextlib.nullcontext()

    @property
    def joining(self) -> Joining | None:
        """Whether `join` is at work; None where it does nothing, of which the caller warns."""
        return None

    def join(self, joinables: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """A context for training on uneven inputs; nothing to do where no collective runs in backward."""
        return contextlib.nullcontext()
