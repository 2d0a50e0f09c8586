"""Sharded, exact, resumable data loaders for PyTorch."""

from accel_data.__about__ import __version__
from accel_data.adapter import DataLoaderAdapter, get_sampler
from accel_data.config import DataLoaderConfiguration
from accel_data.dispatch import DataLoaderDispatcher
from accel_data.iterable import IterableDatasetShard
from accel_data.mixin import DataLoaderStateMixin
from accel_data.order import SeedableRandomSampler
from accel_data.prepare import prepare_data_loader, skip_first_batches
from accel_data.samplers import BatchSamplerShard, SkipBatchSampler
from accel_data.seeds import sample_generator, sample_rng, sample_seed
from accel_data.shard import DataLoaderShard, SkipDataLoader

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "__version__",
    "get_sampler",
    "prepare_data_loader",
    "sample_generator",
    "sample_rng",
    "sample_seed",
    "skip_first_batches",
]
