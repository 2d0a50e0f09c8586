"""A seed for each sample: what augmentation draws from, whoever reads the sample.

A seed is a function of the loader's seed, the epoch and the sample's index. The number of processes and
workers, dispatching, and where a run was interrupted have no part in it. Every pass has one key, made of seed
and epoch. It is at hand in the thread that fetches samples while it does so, and nowhere else; to workers it
goes through shared memory, so that it also reaches those that live on between epochs.
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
    """The key of the pass whose samples this thread fetches; a tensor of shape (1,) in a worker."""

    # A class attribute is the value that every new thread starts with.
    key: int | torch.Tensor | None = None


_reading = _Reading()


def sample_seed(index: SupportsIndex) -> int:
    """Return the seed of a sample in the epoch that is being read.

    It is for the `__getitem__`, `__getitems__` or collate_fn of a dataset that a prepared loader reads, in
    the thread that they are called in, and for the `__iter__` of an iterable dataset.

    Args:
        index: What distinguishes the sample from the others of its dataset: the index that `__getitem__`
            gets. In an iterable dataset, the number of the sample in the whole stream, or another integer of
            its own; not its number among those of one worker.

    Returns:
        An integer of 63 bits: the same on any number of processes and workers and after a resume, another one
        in each epoch.

    Raises:
        RuntimeError: If no prepared loader is fetching samples in this thread.
        TypeError: If index is no integer.
    """
    key = _reading.key
    if key is None:
        raise RuntimeError(
            f"There is no seed for sample {index!r}: no prepared loader is fetching samples in this thread. "
            "Call sample_seed in the dataset's __getitem__ (in the thread that calls it), and read the "
            "dataset through a loader that prepare_data_loader or Accelerator.prepare returned."
        )
    # In a worker the key is shared memory: the main process writes that of the next pass there.
    if isinstance(key, torch.Tensor):
        key = int(key)
    try:
        # 63 bits: torch takes seeds as signed integers of 64.
        return mix_seed(key, operator.index(index)) >> 1
    except TypeError:
        raise TypeError(
            f"sample_seed takes an integer, but got {index!r}. Pass one that distinguishes the sample "
            "from the others of its dataset, as its place in a list of all keys."
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
    """Seed the global random generators with `sample_seed(index)` inside of a `with` statement.

    For transforms that draw from torch's, Python's or numpy's global generator. After it these generators go
    on as if nothing had been drawn.

    Args:
        index: See `sample_seed`.

    Returns:
        A context manager.
    """
    return IsolatedRNG(sample_seed(index))


def pass_key(seed: int, epoch: int) -> int:
    """Return the key of a pass, an integer of 63 bits: it fits into a signed tensor."""
    return mix_seed(seed, epoch) >> 1


def keyed(
    loader: DataLoader[Any], start: Callable[[], Iterator[Any]], key: int, rank: int = 0
) -> Iterator[Any]:
    """Start a loader's iteration so that its dataset finds the key of the pass.

    Args:
        loader: The loader that is iterated.
        start: Starts the iteration.
        key: The key.
        rank: See `WithKey`.

    Returns:
        The batches.
    """
    if loader.num_workers:
        with _shared_key(loader, key, rank):
            return start()
    with _at_hand(key):
        batches = start()
    return _fetched(batches, key)


def _fetched(batches: Iterator[Any], key: int) -> Iterator[Any]:
    """Fetch batches in this thread, each with the key at hand: loaders that take turns do not mix."""
    # Local names, as this runs for every batch.
    reading, read = _reading, batches.__next__
    profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
    # A private of torch since 1.2, which its own __next__ calls within a region of the profiler. Where nobody
    # profiles, this region takes as long as all else that is done for a batch here.
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
def _at_hand(key: int) -> Iterator[None]:
    outer, _reading.key = _reading.key, key
    try:
        yield
    finally:
        _reading.key = outer


class WithKey:
    """A worker_init_fn through which a worker finds the key of the pass, and has the seed of its process.

    Args:
        key: Shape (1,), in shared memory.
        init: The user's worker_init_fn.
        rank: Which part of the data the process reads. Workers of 0 keep torch's seed, which is the same on
            all processes after `set_seed`; those of others get one that is made of it.
    """

    def __init__(self, key: torch.Tensor, init: Callable[[int], None] | None, rank: int = 0) -> None:
        self.key = key
        self.init = init
        self.rank = rank

    def __call__(self, worker_id: int) -> None:
        """Note the key, seed the global generators, then do what the user's function does."""
        _reading.key = self.key
        if self.rank:
            _seed_worker(self.rank)
        if self.init is not None:
            self.init(worker_id)


def _seed_worker(rank: int) -> None:
    info = get_worker_info()
    assert info is not None
    seed = mix_seed(info.seed, rank) >> 1
    # Past the check of a frozen class: users seed their own generators from it.
    object.__setattr__(info, "seed", seed)
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def _shared_key(loader: DataLoader[Any], key: int, rank: int) -> Iterator[None]:
    """Let the workers that start here, or live on, find the key."""
    shared: torch.Tensor | None = getattr(loader, "_worker_key", None)
    if shared is not None and loader.persistent_workers and loader._iterator is not None:
        shared[0] = key  # what the workers have read ahead for an older pass is thrown away
        yield
        return
    # New workers get a tensor of their own: those of another iteration may still be reading.
    shared = torch.tensor([key], device="cpu").share_memory_()  # type: ignore[no-untyped-call]
    # On the loader, whose workers live no longer than it does.
    loader._worker_key = shared
    init = loader.worker_init_fn
    # torch reads it when it starts the workers, which is done inside of this block.
    loader.worker_init_fn = WithKey(shared, init, rank)
    try:
        yield
    finally:
        loader.worker_init_fn = init
