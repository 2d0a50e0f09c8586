"""Sharded data loaders, under their documented path: re-exports of accel-data."""

from accel_data.dispatch.loader import DataLoaderDispatcher as DataLoaderDispatcher
from accel_data.loader.base import DataLoaderAdapter as DataLoaderAdapter
from accel_data.loader.base import get_sampler as get_sampler
from accel_data.loader.mixin import DataLoaderStateMixin as DataLoaderStateMixin
from accel_data.loader.shard import DataLoaderShard as DataLoaderShard
from accel_data.loader.shard import SkipDataLoader as SkipDataLoader
from accel_data.order.global_order import SeedableRandomSampler as SeedableRandomSampler
from accel_data.order.samplers import BatchSamplerShard as BatchSamplerShard
from accel_data.order.skipping import SkipBatchSampler as SkipBatchSampler
from accel_data.prepare import prepare_data_loader as prepare_data_loader
from accel_data.skip import skip_first_batches as skip_first_batches
from accel_data.stream.dataset import IterableDatasetShard as IterableDatasetShard
