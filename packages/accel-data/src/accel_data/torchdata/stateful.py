"""Loaders and samplers of torchdata, if it is installed (the extra `stateful`)."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accel_data.order.global_order import SeedableRandomSampler
from accel_state.imports.packages import require

_LOADERS = "torchdata.stateful_dataloader"
_SAMPLERS = "torchdata.stateful_dataloader.sampler"


def loader_class(stateful: bool) -> type[DataLoader[Any]]:
    """Return torchdata's StatefulDataLoader, or torch's DataLoader."""
    if not stateful:
        return DataLoader
    loader: type[DataLoader[Any]] = require(
        "torchdata.stateful_dataloader", "stateful", "accel-data"
    ).StatefulDataLoader
    return loader


_classes: dict[type, type] = {}
"""Subclasses that are also torchdata's loader, by the original class."""


def stateful_class(kind: type[DataLoader[Any]]) -> type[Any]:
    """Return a subclass of a prepared loader that is also torchdata's StatefulDataLoader.

    It reads as before: it is only an instance of torchdata's class.

    Args:
        kind: The class of the loader.

    Raises:
        ImportError: If torchdata is not installed.
    """
    base = loader_class(stateful=True)
    if kind in _classes or issubclass(kind, base):
        return _classes.get(kind, kind)
    # Methods of the prepared loader that torchdata's class would otherwise replace in the order of bases.
    content = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__iter__": kind.__iter__,
        "__reduce__": lambda self: (_empty, (kind,), self.__dict__),  # the class has no importable name
        # torch's: torchdata's iterators would count batches twice.
        "_get_iterator": DataLoader._get_iterator,
    }
    _classes[kind] = type(kind.__name__, (kind, base), content)
    return _classes[kind]


def _empty(kind: type[DataLoader[Any]]) -> Any:
    return object.__new__(stateful_class(kind))


def is_stateful(dataloader: DataLoader[Any]) -> bool:
    """Return whether a loader is torchdata's StatefulDataLoader."""
    module = sys.modules.get(_LOADERS)
    return module is not None and isinstance(dataloader, module.StatefulDataLoader)


def as_torch_sampler(sampler: Any, generator: torch.Generator | None, data_seed: int | None) -> Any:
    """Return a sampler of torch to replace one of torchdata, which tracks its own position.

    Args:
        sampler: Any sampler or batch sampler. It is not changed.
        generator: The user's generator, that of the loader. A random sampler that draws from another one,
            which torchdata makes if there is none, gets an order that is a function of seed and epoch.
        data_seed: Its seed; by default the initial seed of its generator.

    Returns:
        A sampler with the same indices (in another order, if it is such a random sampler); the original if it
        is not of torchdata.
    """
    module = sys.modules.get(_SAMPLERS)
    if module is None:
        return sampler
    if type(sampler) is module.BatchSampler:
        inner = as_torch_sampler(sampler.sampler, generator, data_seed)
        return BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    if isinstance(sampler, BatchSampler) and type(sampler.sampler) is module.RandomSampler:
        changed = copy.copy(sampler)
        changed.sampler = as_torch_sampler(sampler.sampler, generator, data_seed)
        return changed
    if type(sampler) is not module.RandomSampler:
        return sampler
    # The private field is None if the sampler follows the length of its dataset.
    drawn = sampler.data_source, sampler.replacement, sampler._num_samples
    if sampler.generator is generator:
        return RandomSampler(*drawn, generator=generator)
    seed = sampler.generator.initial_seed() if data_seed is None else data_seed
    return SeedableRandomSampler(*drawn, data_seed=seed)
