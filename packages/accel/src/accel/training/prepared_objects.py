"""What was prepared, and from what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast
from weakref import ref

import torch

from accel.engines.common.loader import unwrap_loader
from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.scheduler import AcceleratedScheduler


@dataclass(frozen=True)
class _Record:
    # Weak references: a loader must not keep what it was made from, and only the lists keep what is prepared.
    original: Callable[[], Any]
    prepared: Callable[[], Any]
    settings: Any


@dataclass(eq=False)
class PreparedObjects:
    """The objects that one Accelerator has prepared: whoever prepares one records it.

    Attributes:
        models: The prepared models, in order; likewise `optimizers`, `schedulers` and `loaders`.
        optimizers: The prepared optimizers.
        schedulers: The prepared schedulers.
        loaders: The prepared loaders.
    """

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    _records: list[_Record] = field(default_factory=list, repr=False)

    def find(self, original: Any, settings: Any = None) -> Any:
        """Return what an object is now that it is prepared.

        Args:
            original: An object that was passed to `prepare`, or the result; a model also as `torch.compile`
                made it, an optimizer or scheduler also as the one inside of its wrapper.
            settings: For a loader, those that it is to be prepared with; None for any.

        Returns:
            The prepared object, which may be `original` itself; None if it is not prepared.
        """
        if isinstance(original, torch.nn.Module):
            return self._find_model(original)
        inner = _unwrap(original)
        for prepared in (*self.optimizers, *self.schedulers):
            if prepared is original or _unwrap(prepared) is inner:
                return prepared
        for record, prepared in self._registered():
            # Prepared again with other settings, it is another loader.
            if settings is not None and record.settings != settings:
                continue
            if inner is not None and (inner is _unwrap(prepared) or inner is record.original()):
                return prepared
        return None

    def record(self, kind: str, original: Any, prepared: Any, settings: Any = None) -> None:
        """Record that an object was prepared.

        Args:
            kind: The list that it belongs to: "models", "optimizers", "schedulers" or "loaders".
            original: The object that was passed.
            prepared: What it became.
            settings: What it was prepared with.
        """
        registered: list[Any] = getattr(self, kind)
        if not any(item is prepared for item in registered):
            registered.append(prepared)
        # Without those that are gone, as programs may prepare a loader for each epoch.
        self._records = [item for item in self._records if item.prepared() is not None]
        self._records.append(_Record(_reference(original), _reference(prepared), settings))

    def replace(self, kind: str, before: Any, prepared: Any) -> None:
        """Record that a prepared object was wrapped once more; a no-op if it is not in its list.

        Args:
            kind: Its list.
            before: What it was.
            prepared: What it is now.
        """
        registered: list[Any] = getattr(self, kind)
        if before is prepared or not any(item is before for item in registered):
            return
        registered[:] = [prepared if item is before else item for item in registered]
        self._records = [
            replace(item, prepared=_reference(prepared)) if item.prepared() is before else item
            for item in self._records
        ]

    def clear(self) -> None:
        """Forget everything; in place, as the engine and its loaders hold the same lists."""
        for registered in (self.models, self.optimizers, self.schedulers, self.loaders, self._records):
            registered.clear()

    def _find_model(self, model: torch.nn.Module) -> torch.nn.Module | None:
        plain = _plain(model)
        for record, prepared in self._registered():
            original = record.original()
            if isinstance(original, torch.nn.Module) and _plain(original) is plain:
                return cast("torch.nn.Module", prepared)
        return next((item for item in self.models if item is model or _plain(item) is plain), None)

    def _registered(self) -> Iterator[tuple[_Record, Any]]:
        """The records of what is still in the lists, which programs may empty, newest first."""
        registered = {
            id(item)
            for each in (self.models, self.optimizers, self.schedulers, self.loaders)
            for item in each
        }
        for record in reversed(self._records):
            prepared = record.prepared()
            if id(prepared) in registered:
                yield record, prepared

    def __getstate__(self) -> dict[str, Any]:
        # Weak references cannot be pickled, and what is prepared is found by itself in a copy.
        return {**vars(self), "_records": []}


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside an AcceleratedOptimizer, or the object itself."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _unwrap(item: Any) -> Any:
    if isinstance(item, AcceleratedScheduler):
        return item.scheduler
    return unwrap_loader(unwrap_optimizer(item))


def _plain(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside of what torch.compile made of it."""
    return getattr(model, "_orig_mod", model)


def _reference(item: Any) -> Callable[[], Any]:
    try:
        return ref(item)
    except TypeError:  # a few classes have no weak references
        return lambda: item
