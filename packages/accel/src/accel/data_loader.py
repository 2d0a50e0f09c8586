"""Sharded data loaders, under their documented path: re-exports of accel-data."""

from __future__ import annotations

from accel_data.dispatch.loader import DataLoaderDispatcher
from accel_data.loader.base import DataLoaderAdapter, get_sampler
from accel_data.loader.mixin import DataLoaderStateMixin
from accel_data.loader.shard import DataLoaderShard, SkipDataLoader
from accel_data.order.global_order import SeedableRandomSampler
from accel_data.order.samplers import BatchSamplerShard, SkipBatchSampler
from accel_data.prepare import prepare_data_loader
from accel_data.skip import skip_first_batches
from accel_data.stream.dataset import IterableDatasetShard

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
