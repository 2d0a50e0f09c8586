"""A seed for each sample, for augmentation that does not depend on who reads the sample.

A seed is a function of the loader's seed, the epoch and the sample's index. It does not depend on the number
of processes and workers, on dispatching, or on where a run was interrupted. Every epoch has one key, made of
seed and epoch. It is available only in the thread that fetches samples, while it does so; workers get it
through shared memory, so that it also reaches persistent workers.
"""

from __future__ import annotations

import operator
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from accel_data.order.global_order import IsolatedRNG
from accel_data.order.mixing import mix_seed


class _Reading(threading.local):
    """The key of the epoch whose samples this thread fetches; a tensor of shape (1,) in a worker."""

    # A class attribute is the value that every new thread starts with.
    key: int | torch.Tensor | None = None


_reading = _Reading()


def sample_seed(index: SupportsIndex) -> int:
    """Return the seed of a sample in the epoch that is being read.

    Call it in the `__getitem__`, `__getitems__` or collate_fn of a dataset that a prepared loader reads, in
    the thread that calls these, or in the `__iter__` of an iterable dataset.

    Args:
        index: What distinguishes the sample from others of its dataset: the index that `__getitem__` gets. In
            an iterable dataset, the number of the sample in the full stream, or another unique integer; not
            its number among those of one worker.

    Returns:
        An integer of 63 bits: the same on any number of processes and workers and after a resume, different
        in each epoch.

    Raises:
        RuntimeError: If no prepared loader is fetching samples in this thread.
        TypeError: If index is not an integer.
    """
    key = _reading.key
    if key is None:
        raise RuntimeError(
            f"There is no seed for sample {index!r}: no prepared loader is fetching samples in this thread. "
            "Call sample_seed in the dataset's __getitem__ (in the thread that calls it), and read the "
            "dataset through a loader that prepare_data_loader or Accelerator.prepare returned."
        )
    # In a worker the key is shared memory: the main process writes that of the next epoch there.
    if isinstance(key, torch.Tensor):
        key = int(key)
    try:
        # 63 bits: torch takes seeds as signed integers of 64.
        return mix_seed(key, operator.index(index)) >> 1
    except TypeError:
        raise TypeError(
            f"sample_seed takes an integer, but got {index!r}. Pass one that distinguishes the sample "
            "from others of its dataset, such as its position in a list of all keys."
        ) from None


def sample_generator(index: SupportsIndex) -> torch.Generator:
    """Return a generator on the CPU that is seeded with `sample_seed(index)`.

    Args:
        index: See `sample_seed`.

    Returns:
        A new generator: two calls with one index give the same numbers.
    """
    return torch.Generator().manual_seed(sample_seed(index))


def sample_rng(index: SupportsIndex) -> IsolatedRNG:
    """Seed the global random generators with `sample_seed(index)` inside a `with` statement.

    For transforms that draw from torch's, Python's or numpy's global generator. Afterwards these generators
    continue as if nothing had been drawn.

    Args:
        index: See `sample_seed`.

    Returns:
        A context manager.
    """
    return IsolatedRNG(sample_seed(index))


def epoch_key(seed: int, epoch: int) -> int:
    """Return the key of an epoch, an integer of 63 bits: it fits into a signed tensor."""
    return mix_seed(seed, epoch) >> 1


def iterate_with_key(
    loader: DataLoader[Any], start: Callable[[], Iterator[Any]], key: int, rank: int = 0
) -> Iterator[Any]:
    """Start a loader's iteration so that its dataset finds the key of the epoch.

    Args:
        loader: The loader that is iterated.
        start: Starts the iteration.
        key: The key.
        rank: See `WorkerInit`.

    Returns:
        The batches.
    """
    if loader.num_workers:
        with _shared_key(loader, key, rank):
            return start()
    with _current_key(key):
        batches = start()
    return _fetch_with_key(batches, key)


def _fetch_with_key(batches: Iterator[Any], key: int) -> Iterator[Any]:
    """Fetch batches in this thread, each with its loader's key: interleaved loaders do not mix."""
    # Local names, as this runs for every batch.
    reading, read = _reading, batches.__next__
    profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
    # A private method of torch since 1.2, which its __next__ calls inside a profiler region. Without a
    # profiler, that region takes as long as everything else done per batch here.
    if type(batches) is _SingleProcessDataLoaderIter:
        read = getattr(batches, "_next_data", read)
    while True:
        outer, reading.key = reading.key, key
        try:
            batch = next(batches) if profiled() else read()
        except StopIteration:
            return
        finally:
            reading.key = outer
        yield batch


@contextmanager
def _current_key(key: int) -> Iterator[None]:
    outer, _reading.key = _reading.key, key
    try:
        yield
    finally:
        _reading.key = outer


class WorkerInit:
    """A worker_init_fn that gives a worker the key of the epoch, and a seed that depends on its process.

    Args:
        key: Shape (1,), in shared memory.
        init: The user's worker_init_fn.
        rank: The data-parallel rank. Workers of rank 0 keep torch's seed, which is the same on all processes
            after `set_seed`; those of other ranks get one derived from it.
    """

    def __init__(self, key: torch.Tensor, init: Callable[[int], None] | None, rank: int = 0) -> None:
        self.key = key
        self.init = init
        self.rank = rank

    def __call__(self, worker_id: int) -> None:
        """Store the key, seed the global generators, then call the user's function."""
        _reading.key = self.key
        if self.rank:
            _seed_worker(self.rank)
        if self.init is not None:
            self.init(worker_id)


def _seed_worker(rank: int) -> None:
    info = get_worker_info()
    assert info is not None
    seed = mix_seed(info.seed, rank) >> 1
    # Bypass the check of a frozen class: users seed their generators from it.
    object.__setattr__(info, "seed", seed)
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def _shared_key(loader: DataLoader[Any], key: int, rank: int) -> Iterator[None]:
    """Share the key with the workers that start here or persist."""
    shared: torch.Tensor | None = getattr(loader, "_worker_key", None)
    if shared is not None and loader.persistent_workers and loader._iterator is not None:
        shared[0] = key  # what the workers have prefetched for an older epoch is discarded
        yield
        return
    # New workers get a new tensor: those of another iteration may still be reading.
    shared = torch.tensor([key], device="cpu").share_memory_()  # type: ignore[no-untyped-call]
    # On the loader, which outlives its workers.
    loader._worker_key = shared
    init = loader.worker_init_fn
    # torch reads it when it starts the workers, inside this block.
    loader.worker_init_fn = WorkerInit(shared, init, rank)
    try:
        yield
    finally:
        loader.worker_init_fn = init
