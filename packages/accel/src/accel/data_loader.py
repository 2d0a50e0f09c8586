"""Sharded data loaders, under their documented path: re-exports of accel-data."""

from __future__ import annotations

from accel_data.adapter import DataLoaderAdapter, get_sampler
from accel_data.dispatch import DataLoaderDispatcher
from accel_data.iterable import IterableDatasetShard
from accel_data.mixin import DataLoaderStateMixin
from accel_data.order import SeedableRandomSampler
from accel_data.prepare import prepare_data_loader, skip_first_batches
from accel_data.samplers import BatchSamplerShard, SkipBatchSampler
from accel_data.shard import DataLoaderShard, SkipDataLoader

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
