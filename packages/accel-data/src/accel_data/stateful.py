"""Loaders and samplers of torchdata, where it is installed (the extra `stateful`)."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accel_data.order import SeedableRandomSampler

__all__ = ["as_plain", "is_stateful"]

_LOADERS = "torchdata.stateful_dataloader"
_SAMPLERS = "torchdata.stateful_dataloader.sampler"


def is_stateful(dataloader: DataLoader[Any]) -> bool:
    """Tell whether a loader is torchdata's StatefulDataLoader."""
    module = sys.modules.get(_LOADERS)
    return module is not None and isinstance(dataloader, module.StatefulDataLoader)


def as_plain(sampler: Any, generator: torch.Generator | None, data_seed: int | None) -> Any:
    """Return a sampler of torch in the place of one of torchdata, which remembers a place of its own.

    Args:
        sampler: Any sampler or batch sampler. It is not changed.
        generator: The user's generator, that of the loader. A random sampler that draws from another one,
            which torchdata makes where there is none, gets an order that is a function of seed and epoch.
        data_seed: Its seed; by default the one that its generator began with.

    Returns:
        A sampler that gives the same indices (in another order, if it is such a random one); the given one if
        it is not of torchdata.
    """
    module = sys.modules.get(_SAMPLERS)
    if module is None:
        return sampler
    if type(sampler) is module.BatchSampler:
        inner = as_plain(sampler.sampler, generator, data_seed)
        return BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    if isinstance(sampler, BatchSampler) and type(sampler.sampler) is module.RandomSampler:
        changed = copy.copy(sampler)
        changed.sampler = as_plain(sampler.sampler, generator, data_seed)
        return changed
    if type(sampler) is not module.RandomSampler:
        return sampler
    drawn = sampler.data_source, sampler.replacement, sampler._num_samples
    if sampler.generator is generator:
        return RandomSampler(*drawn, generator=generator)
    seed = sampler.generator.initial_seed() if data_seed is None else data_seed
    return SeedableRandomSampler(*drawn, data_seed=seed)
