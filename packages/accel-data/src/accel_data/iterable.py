"""Sharing out a dataset that can only be read from the front.

Every process reads the same stream, one step of all processes at a time, and keeps its own samples. Workers
of a loader take turns at the batches, so that the order does not depend on their number; a dataset that
divides itself over the workers is left to do so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from accel_data.checks import check_divides, check_place
from accel_data.layout import Layout
from accel_ops.tree import ignorant_find_batch_size

__all__ = [
    "Block",
    "BlockReader",
    "CollateBlock",
    "IterableDatasetShard",
    "Stream",
    "count_rows",
    "open_stream",
]


class Block(NamedTuple):
    """The samples of one batch of one process.

    Args:
        samples: The samples, padding included.
        real: How many samples of each process are real in this step; None if none is padded.
    """

    samples: list[Any]
    real: tuple[int, ...] | None


class IterableDatasetShard(IterableDataset[Any]):
    """Gives one process its part of the samples of an iterable dataset.

    On two processes, with batch_size=4, a dataset of [0, 1, 2, 3, 4, 5, 6, 7] gives

    - without `split_batches`: [0, 1, 2, 3] to process 0 and [4, 5, 6, 7] to process 1;
    - with it: [0, 1, 4, 5] to process 0 and [2, 3, 6, 7] to process 1.

    An incomplete last step is dropped with `drop_last`, else completed with samples from the start.

    Args:
        dataset: The dataset. Every process must read the same samples from it in the same order.
        batch_size: Samples in a batch of one process; with `split_batches`, of all processes together.
        drop_last: Drop the last step if it is incomplete.
        num_processes: Number of processes.
        process_index: Index of this one.
        split_batches: Give each process a piece of every batch, not every n-th batch.
        even_batches: Complete an incomplete last step; without it the last processes get fewer samples.

    Raises:
        ValueError: If the batch size is not positive or does not divide by num_processes with split_batches,
            or if process_index is no process.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        even_batches: bool = True,
    ) -> None:
        check_place(num_processes, process_index)
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive integer, but it is {batch_size!r}.")
        if split_batches:
            check_divides(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.epoch = 0
        self.counts_rows = False  # whether an item is a whole batch, whose rows are counted as samples

    @property
    def share(self) -> int:
        """Samples in a batch of one process."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    @property
    def total_length(self) -> int:
        """Length of the dataset, all processes together."""
        return len(self.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, also for the dataset.

        Args:
            epoch: Its number, from 0.
        """
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        layout = self._layout()
        length = self.total_length
        full = length // layout.group * layout.share
        return full + layout.tail_sizes(layout.tail(length))[self.process_index]

    def __iter__(self) -> Iterator[Any]:
        for block in self.blocks():
            yield from block.samples

    def blocks(self, start: int = 0) -> Iterator[Block]:
        """Read the batches of this process, or of this worker of it.

        Args:
            start: Number of samples of the stream to pass over first.

        Yields:
            One block per batch.
        """
        layout = self._layout()
        stream = open_stream(self.dataset)
        if stream.divided:  # the workers' batches before `start` came in turn
            start = len(range(stream.worker, start // layout.group, stream.num_workers)) * layout.group
        head = list(islice(stream.samples, layout.group))  # padding comes from here
        samples = islice(chain(head, stream.samples), start, None)
        for number in count():
            group = list(islice(samples, layout.group))
            if not group:
                return
            mine = stream.divided or number % stream.num_workers == stream.worker
            if mine and (block := self._own(group, head, layout)):
                yield block

    def _own(self, group: list[Any], head: list[Any], layout: Layout) -> Block | None:
        first = self.process_index * layout.share
        missing = layout.group - len(group)
        if not missing:
            return Block(group[first : first + layout.share], None)
        size = layout.tail_sizes(len(group))[self.process_index]
        if not size:
            return None
        real = layout.padded(len(group))
        if real and self.counts_rows:
            real = tuple(count_rows(group[rank]) if there else 0 for rank, there in enumerate(real))
        group = group + [head[i % len(head)] for i in range(missing)]
        return Block(group[first : first + size], real)

    def _layout(self) -> Layout:
        return Layout(self.share, self.num_processes, self.drop_last, self.even_batches)


class BlockReader(IterableDataset[Any]):
    """Gives a loader whole batches of a shard, with what is known of their padding.

    Epoch and start reach the workers through shared memory, also when the workers live on between epochs.

    Args:
        shard: The shard.
        shared: Whether there are workers.
    """

    def __init__(self, shard: IterableDatasetShard, shared: bool) -> None:
        self.shard = shard
        place = torch.zeros(2, dtype=torch.int64)
        self.place = place.share_memory_() if shared else place  # type: ignore[no-untyped-call]

    def seek(self, epoch: int, start: int) -> None:
        """Choose where the next pass starts.

        Args:
            epoch: Number of the epoch.
            start: Number of samples of its stream to pass over.
        """
        self.place[0], self.place[1] = epoch, start

    def __iter__(self) -> Iterator[Block]:
        epoch, start = self.place.tolist()
        if get_worker_info() is not None:
            self.shard.set_epoch(epoch)
        return self.shard.blocks(start)


class CollateBlock:
    """Turns a block into (real, batch).

    Args:
        collate_fn: Makes the batch.
        batched: Whether it takes the list of samples; otherwise the block's one item.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool) -> None:
        self.collate_fn = collate_fn
        self.batched = batched

    def __call__(self, block: Block) -> tuple[tuple[int, ...] | None, Any]:
        """Return how much of the block is real, and its batch."""
        samples = block.samples
        return block.real, self.collate_fn(samples if self.batched else samples[0])


class Stream(NamedTuple):
    """A dataset that is being read, maybe in a worker of a loader.

    Args:
        samples: What is left of it.
        worker: Index of the worker; 0 where there is none.
        num_workers: Number of workers; 1 where there are none.
        divided: Whether the dataset gives each worker samples of its own, so that they need not take turns.
    """

    samples: Iterator[Any]
    worker: int = 0
    num_workers: int = 1
    divided: bool = False


def open_stream(dataset: Iterable[Any]) -> Stream:
    """Start reading a dataset.

    Args:
        dataset: The dataset. If it asks for the number of workers before it gives its first sample, it
            divides itself over them.

    Returns:
        The stream.
    """
    info = get_worker_info()
    if info is None:
        return Stream(iter(dataset))
    with _watched(info) as watch:
        samples = iter(dataset)
        head = list(islice(samples, 1))
    return Stream(chain(head, samples), info.id, info.num_workers, watch.asked)


def count_rows(item: Any) -> int:
    """Return the batch size of an item; 1 if it has none."""
    return ignorant_find_batch_size(item) or 1


class _Watch:
    """A worker's information that notes whether somebody asks for the number of workers."""

    def __init__(self, info: Any) -> None:
        self.info = info
        self.asked = False

    def __getattr__(self, name: str) -> Any:
        if name == "num_workers":
            self.asked = True
        return getattr(self.info, name)


@contextmanager
def _watched(info: Any) -> Iterator[_Watch]:
    # torch has no public way to see this; get_worker_info returns this variable.
    watch = _Watch(info)
    torch_worker._worker_info = watch  # type: ignore[assignment]
    try:
        yield watch
    finally:
        torch_worker._worker_info = info
