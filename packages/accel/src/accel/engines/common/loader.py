"""Prepared loaders whose batches an engine changes on their way to the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

_Loader = TypeVar("_Loader", bound="EngineLoader")


class EngineLoader:
    """A prepared loader whose batches an engine changes; everything else is the prepared loader's.

    Args:
        loader: The prepared loader.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.loader)

    def with_loader(self: _Loader, loader: Any) -> _Loader:
        """Return a copy of this around another prepared loader."""
        # A copy keeps the attributes of subclasses (groups, devices); both loaders stay usable.
        other = copy.copy(self)
        other.loader = loader
        return other

    def skip_first_batches(self: _Loader, num_batches: int) -> _Loader:
        """Return a copy of this without its first batches; `accel.skip_first_batches` calls it.

        Args:
            num_batches: Number of batches to leave out.
        """
        from accel_data.skip import skip_first_batches

        return self.with_loader(skip_first_batches(self.loader, num_batches))

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.loader, name)


def unwrap_loader(loader: Any) -> Any:
    """Return the prepared loader inside of one that an engine has wrapped, or the object itself."""
    return loader.loader if isinstance(loader, EngineLoader) else loader
