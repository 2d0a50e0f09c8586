"""How an engine's processes share data: the fourth part of the seam."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Joining", "Loaders"]


@dataclass
class Joining:
    """Whether processes that are out of data are shadowed now; loaders share it with their engine."""

    active: bool = False


class Loaders:
    """All data for one process; made anew whenever it is asked for.

    Args:
        engine: Whose processes share the data.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def data_shard(self) -> tuple[int, int]:
        """(rank, size) along the data-parallel dimension; the loaders shard by it."""
        return 0, 1

    @property
    def data_ranks(self) -> list[int] | None:
        """The rank along that dimension of each process, where it is neither its own nor said by the mesh."""
        return None

    def loader_to_prepare(self, loader: Any) -> Any:
        """The loader whose batches are shared out, in the place of one that is to be prepared."""
        return loader

    own_kinds: tuple[type, ...] = ()
    """Types of objects that this engine alone prepares."""

    def prepare_own(self, item: Any, caller: Any) -> Any:
        """The prepared form of an object of `own_kinds`, for an Accelerator."""
        raise NotImplementedError

    def share_loader(self, loader: Any) -> Any:
        """A prepared loader as it feeds a model that was prepared in the same call."""
        return loader

    @property
    def joining(self) -> Joining | None:
        """Whether `join` is at work; None where it does nothing, of which the caller is told."""
        return None

    def join(self, joinables: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """A context for training on uneven inputs; nothing to do where no collective runs in backward."""
        return contextlib.nullcontext()
