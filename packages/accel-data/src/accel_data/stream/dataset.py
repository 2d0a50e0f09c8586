"""Shards a stream, a dataset that can only be read from its start.

Every process reads the same stream, one global step at a time, and keeps its samples. Workers of a loader
take turns at the batches, so that the order does not depend on their number, unless the dataset splits itself
over the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accel_data.checks import check_divisible, check_rank
from accel_data.loader.read_ahead import RandomUse
from accel_data.order.layout import Layout, StepRows, count_samples
from accel_data.resume.stream_position import BlockPosition, StreamPosition
from accel_data.stream.first_sample import FirstSample, detect_rank_query, digest_of
from accel_data.stream.reader import Source, StreamReader, read
from accel_ops.trees.tensors import ignorant_find_batch_size


class Block(NamedTuple):
    """The samples of one batch of one process.

    Args:
        samples: The samples, padding included; empty for a batch to skip.
        step_rows: The sizes in this step, if something is padded or a process has no batch.
        position: Where the stream is after it; before the first batch, the sample that the ranks compare.
    """

    samples: list[Any]
    step_rows: StepRows | None
    position: StreamPosition | BlockPosition | FirstSample


class IterableDatasetShard(IterableDataset[Any]):
    """Yields the shard of one process of an iterable dataset.

    On two processes, with batch_size=4, a dataset of [0, 1, 2, 3, 4, 5, 6, 7] gives

    - without `split_batches`: [0, 1, 2, 3] to process 0 and [4, 5, 6, 7] to process 1;
    - with it: [0, 1, 4, 5] to process 0 and [2, 3, 6, 7] to process 1.

    An incomplete last step is dropped with `drop_last`, else padded with samples from the start.

    Args:
        dataset: The dataset. Every process must read the same samples from it in the same order.
        batch_size: Samples in a batch of one process; with `split_batches`, in a global batch.
        drop_last: Drop the last step if it is incomplete.
        num_processes: Number of processes.
        process_index: Index of this process.
        split_batches: Split every batch over the processes, instead of giving each process every n-th batch.
        even_batches: Pad an incomplete last step; without it the last processes get fewer samples.
        balance_last_step: Split an incomplete last step as evenly as possible if it is not padded or if
            batches are split, and pad it with its own samples; as prepared loaders do.

    Raises:
        ValueError: If the batch size is not positive or does not divide by num_processes with split_batches,
            or if process_index is out of range.
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
        balance_last_step: bool = False,
    ) -> None:
        check_rank(num_processes, process_index)
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive integer, but it is {batch_size!r}.")
        if split_batches:
            check_divisible(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.balance_last_step = balance_last_step
        self.epoch = 0
        self._source = Source(dataset)

    @property
    def per_rank_batch(self) -> int:
        """Samples in a batch of one process."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    @property
    def total_length(self) -> int:
        """Length of the full dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def step_size(self) -> int:
        """Samples of one step over all processes."""
        return self.per_rank_batch * self.num_processes

    @property
    def chunk(self) -> int:
        """Samples of a block, if the dataset splits itself over workers, which then make their own blocks."""
        return self.step_size

    @property
    def is_even(self) -> bool:
        """Whether every process gets equally many batches, whatever the data."""
        return self.even_batches or self.drop_last

    def batches_per_rank(self, start: int) -> tuple[int, ...] | None:
        """Return the number of batches of each process in a run; None if the length is unknown.

        Args:
            start: Where the run starts, in samples.
        """
        if not hasattr(self.dataset, "__len__"):
            return None
        layout = self._layout(start)
        return tuple(layout.num_batches(self.total_length, rank) for rank in range(self.num_processes))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also for the dataset.

        Args:
            epoch: Its number, from 0.
        """
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        layout = self._layout()
        length = self.total_length
        full = length // layout.step_size * layout.per_rank_batch
        return full + layout.last_step_sizes(layout.remainder(length))[self.process_index]

    def __iter__(self) -> Iterator[Any]:
        for block in self.blocks():
            yield from block.samples

    def blocks(
        self,
        start: int = 0,
        resume_from: StreamPosition | None = None,
        counts_rows: bool = False,
        yields_first_sample: bool = False,
    ) -> Iterator[Block]:
        """Read the batches of this process, or of this worker.

        Args:
            start: Number of samples of the stream to skip. Workers that split the dataset cannot know how
                many of these are theirs: they also yield the batches before it, without samples if certain.
            resume_from: Position to start at instead.
            counts_rows: Whether an item is a batch, whose rows are counted as samples.
            yields_first_sample: Whether to first yield an empty block with a `FirstSample`.

        Yields:
            One block per batch.
        """
        use = RandomUse() if yields_first_sample else None
        layout = self._layout()
        # Kept only for padding: otherwise nothing is read in advance.
        head = layout.step_size if layout.even_batches and not layout.drop_last else 0
        with detect_rank_query(yields_first_sample) as rank_queries:
            reading = read(self._source, self.chunk, start, resume_from, head)
            if reading.split_by_workers:
                layout = self._layout_of_worker()
            step = reading.take(layout.step_size)
        num_skipped = _num_certainly_before(start // self.chunk, reading) if resume_from is None else 0
        number = -1
        if use is not None:
            yield Block([], None, FirstSample(digest_of(step), use.seen(), bool(rank_queries)))
        while step:
            for samples, step_rows in self._batches(step, reading, layout, counts_rows):
                number += 1
                # Not split: every worker reads the full stream, and makes every num_workers-th batch.
                if reading.split_by_workers or number % reading.num_workers == reading.worker:
                    # Without samples, as nothing has to be collated for a skipped batch.
                    yield Block([] if number < num_skipped else samples, step_rows, reading.position())
            step = reading.take(layout.step_size)

    def _batches(
        self, step: list[Any], reading: StreamReader, layout: Layout, counts_rows: bool
    ) -> list[tuple[list[Any], StepRows | None]]:
        """Return the batch of this process in one step, if it has one."""
        if len(step) == layout.step_size:  # as in all steps but the last
            return [(layout.split_step(step, reading.head, self.process_index)[0], None)]
        step_rows = layout.step_rows(len(step), self.process_index)
        if reading.split_by_workers and not layout.even_batches:
            step_rows = None  # a process without a batch here continues with one of the next worker
        if step_rows and counts_rows:
            step_rows = count_samples(step_rows, layout.split_step(step, reading.head, None), count_rows)
        return [(samples, step_rows) for samples in layout.split_step(step, reading.head, self.process_index)]

    def _layout(self, start: int = 0) -> Layout:
        even = self.even_batches
        balance_last_step = self.balance_last_step and (self.split_batches or not even)
        return Layout(self.per_rank_batch, self.num_processes, self.drop_last, even, start, balance_last_step)

    def _layout_of_worker(self) -> Layout:
        """The layout of a worker's shard, if the dataset splits itself over workers."""
        return self._layout()


class AllRanksStream(IterableDatasetShard):
    """The batches of all processes, step by step: those of process 0, 1, ..., then the next step's.

    In the last step, only the sizes of a single batch are known.

    Args:
        *args: Those of `IterableDatasetShard`.
        joins_step: Join the batches of one step into one.
        **kwargs: Those of `IterableDatasetShard`.
    """

    def __init__(self, *args: Any, joins_step: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.joins_step = joins_step

    @property
    def chunk(self) -> int:
        """Samples of a block, if the dataset splits itself over workers, which then make their own blocks."""
        return self.step_size if self.joins_step else self.per_rank_batch

    def _batches(
        self, step: list[Any], reading: StreamReader, layout: Layout, counts_rows: bool
    ) -> list[tuple[list[Any], StepRows | None]]:
        batches = layout.split_step(step, reading.head, None)
        is_full = len(step) == layout.step_size
        real = (layout.per_rank_batch,) * len(batches) if is_full else layout.real_sizes(len(step))
        if self.joins_step and batches:
            batches, real = [list(chain(*batches))], (sum(real),)
        return [
            (samples, None if is_full else StepRows((count,), (len(samples),)))
            for samples, count in zip(batches, real, strict=False)
        ]

    def _layout_of_worker(self) -> Layout:
        # As for one process: a shard is split into the chunks that one worker yields per turn.
        return Layout(self.chunk, 1, self.drop_last, self.even_batches)


class PreshardedStream(IterableDatasetShard):
    """An iterable dataset that already yields only the samples of this process.

    The number of samples of other processes is unknown: nothing is padded.

    Args:
        dataset: The dataset.
        batch_size: Samples in a batch.
        drop_last: Drop the last batch if it is incomplete.
        pre_shard: (index, number) of the process that these samples are for.
    """

    def __init__(
        self, dataset: IterableDataset[Any], batch_size: int, drop_last: bool, pre_shard: tuple[int, int]
    ) -> None:
        # As for a single process: the dataset has only the samples of this one.
        super().__init__(dataset, batch_size, drop_last, even_batches=False)
        self.pre_shard = pre_shard

    @property
    def step_size(self) -> int:
        """Samples of one step over all processes."""
        return self.per_rank_batch * self.pre_shard[1]

    @property
    def is_even(self) -> bool:
        """Whether every process gets equally many batches: unknown."""
        return False

    @property
    def chunk(self) -> int:
        """Samples of a block of a dataset that splits itself over workers."""
        return self.per_rank_batch

    def batches_per_rank(self, start: int) -> tuple[int, ...] | None:
        """Return None: the number of samples of other processes is unknown."""
        return None


class BlockReader(IterableDataset[Any]):
    """Yields complete batches of a shard to a loader, with their padding.

    Epoch and start reach the workers, including persistent ones, through shared memory.

    Args:
        shard: The shard.
        shared: Whether there are workers.
        resume_from: Where the first iteration starts, if in the middle of an epoch that another run began.
        counts_rows: See `IterableDatasetShard.blocks`.
    """

    def __init__(
        self,
        shard: IterableDatasetShard,
        shared: bool,
        resume_from: StreamPosition | None = None,
        counts_rows: bool = False,
    ) -> None:
        self.shard = shard
        self.resume_from = resume_from
        self.counts_rows = counts_rows
        # Epoch (-1: unchanged), samples to skip, whether to start at the position, and whether to yield the
        # first sample; one tensor, read by workers.
        where = torch.zeros(4, dtype=torch.int64, device="cpu")
        # Shared only with workers: shared memory takes a file descriptor.
        self.where = where.share_memory_() if shared else where  # type: ignore[no-untyped-call]

    def seek(
        self, epoch: int | None, start: int, from_position: bool = False, yields_first_sample: bool = False
    ) -> None:
        """Set where the next iteration starts.

        Args:
            epoch: Number of the epoch; None for the current one of the dataset.
            start: Number of samples of its stream to skip.
            from_position: Whether to start at `resume_from` instead.
            yields_first_sample: See `IterableDatasetShard.blocks`.
        """
        self.where[0] = -1 if epoch is None else epoch
        self.where[1], self.where[2], self.where[3] = start, from_position, yields_first_sample

    def __iter__(self) -> Iterator[Block]:
        epoch, start, from_position, yields_first_sample = self.where.tolist()
        # A worker has a copy of the dataset; in the main process the loader has set the epoch.
        if epoch >= 0 and get_worker_info() is not None:
            self.shard.set_epoch(epoch)
        resume_from = self.resume_from if from_position else None
        return self.shard.blocks(start, resume_from, self.counts_rows, bool(yields_first_sample))


class CollateBlock:
    """Converts a block to (step_rows, batch, position).

    Args:
        collate_fn: Makes the batch.
        batched: Whether it takes the list of samples; otherwise the block's single item.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool) -> None:
        self.collate_fn = collate_fn
        self.batched = batched

    def __call__(
        self, block: Block
    ) -> tuple[StepRows | None, Any, StreamPosition | BlockPosition | FirstSample]:
        """Return the sizes in the step, the batch, and where the stream is after it."""
        samples = block.samples
        batch = self.collate_fn(samples if self.batched else samples[0]) if samples else None
        return block.step_rows, batch, block.position


def _num_certainly_before(number: int, reading: StreamReader) -> int:
    """Return how many batches of this worker surely come before global batch `number`."""
    return len(range(reading.worker, number, reading.num_workers)) if reading.split_by_workers else 0


def count_rows(item: Any) -> int:
    """Return the batch size of an item; 1 if it has none."""
    return ignorant_find_batch_size(item) or 1
