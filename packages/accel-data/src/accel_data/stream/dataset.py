"""Sharing out a dataset that can only be read from the front.

Every process reads the same stream, one step of all processes at a time, and keeps its own samples. Workers
of a loader take turns at the batches, so that the order does not depend on their number; a dataset that
divides itself over the workers is left to do so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accel_data.checks import check_divides, check_place
from accel_data.loader.read_ahead import RandomUse
from accel_data.order.layout import Layout, StepRows, counted
from accel_data.resume.stream_position import Mark, StreamPosition
from accel_data.stream.first_sample import FirstSample, digest_of, watching_for_rank
from accel_data.stream.reader import Reading, Source, read
from accel_ops.trees.tensors import ignorant_find_batch_size


class Block(NamedTuple):
    """The samples of one batch of one process.

    Args:
        samples: The samples, padding included; none for a batch that is to be passed over.
        fill: What the processes have in this step, where something is padded or a process has no batch.
        mark: Where the stream is after it, or before the first batch what the processes compare.
    """

    samples: list[Any]
    fill: StepRows | None
    mark: StreamPosition | Mark | FirstSample


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
        spread: Share out an incomplete last step as equally as can be where it is not completed, or where
            batches are split, and complete it with its own samples; as prepared loaders do.

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
        spread: bool = False,
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
        self.spread = spread
        self.epoch = 0
        self._source = Source(dataset)

    @property
    def share(self) -> int:
        """Samples in a batch of one process."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    @property
    def total_length(self) -> int:
        """Length of the dataset, all processes together."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def step_size(self) -> int:
        """Samples of one step of all processes."""
        return self.share * self.num_processes

    @property
    def chunk(self) -> int:
        """Samples of a block of a dataset that divides itself over workers: there each makes its own."""
        return self.step_size

    @property
    def is_even(self) -> bool:
        """Whether every process gets as many batches, whatever the data."""
        return self.even_batches or self.drop_last

    def batches_of_each(self, start: int) -> tuple[int, ...] | None:
        """Return the number of batches of each process in a pass; None where the length is not known.

        Args:
            start: Where the pass starts, in samples.
        """
        if not hasattr(self.dataset, "__len__"):
            return None
        layout = self._layout(start)
        return tuple(layout.num_batches(self.total_length, rank) for rank in range(self.num_processes))

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

    def blocks(
        self,
        start: int = 0,
        place: StreamPosition | None = None,
        counts_rows: bool = False,
        shows_first: bool = False,
    ) -> Iterator[Block]:
        """Read the batches of this process, or of this worker of it.

        Args:
            start: Number of samples of the stream to pass over first. Workers that divide the dataset cannot
                know how many of them are theirs: they also give the batches before it, without samples where
                they are sure.
            place: Where to start instead.
            counts_rows: Whether an item is a whole batch, whose rows are counted as samples.
            shows_first: Whether to give a block without samples first, with a `FirstSample`.

        Yields:
            One block per batch.
        """
        use = RandomUse() if shows_first else None
        layout = self._layout()
        # Kept for padding alone: nothing is read in advance where nothing is padded.
        head = layout.group if layout.even and not layout.drop_last else 0
        with watching_for_rank(shows_first) as asked:
            reading = read(self._source, self.chunk, start, place, head)
            if reading.divided:
                layout = self._layout_of_worker()
            group = reading.take(layout.group)
        over = _surely_before(start // self.chunk, reading) if place is None else 0
        number = -1
        if use is not None:
            yield Block([], None, FirstSample(digest_of(group), use.seen(), bool(asked)))
        while group:
            for samples, fill in self._batches(group, reading, layout, counts_rows):
                number += 1
                # Not divided: every worker reads the whole stream, and makes every num_workers-th batch.
                if reading.divided or number % reading.num_workers == reading.worker:
                    # Without samples, as nothing has to be collated for a batch that is passed over.
                    yield Block([] if number < over else samples, fill, reading.mark())
            group = reading.take(layout.group)

    def _batches(
        self, group: list[Any], reading: Reading, layout: Layout, counts_rows: bool
    ) -> list[tuple[list[Any], StepRows | None]]:
        """Return the batch of this process in one step, if it has one."""
        if len(group) == layout.group:  # as in all steps but the last
            return [(layout.deal(group, reading.head, self.process_index)[0], None)]
        fill = layout.fill(len(group), self.process_index)
        if reading.divided and not layout.even:
            fill = None  # a process without a batch here goes on with one of the next worker
        if fill and counts_rows:
            fill = counted(fill, layout.deal(group, reading.head, None), count_rows)
        return [(samples, fill) for samples in layout.deal(group, reading.head, self.process_index)]

    def _layout(self, start: int = 0) -> Layout:
        even = self.even_batches
        spread = self.spread and (self.split_batches or not even)
        return Layout(self.share, self.num_processes, self.drop_last, even, start, spread)

    def _layout_of_worker(self) -> Layout:
        """How the part of a worker is cut, where the dataset divides itself over workers."""
        return self._layout()


class WholeStream(IterableDatasetShard):
    """The batches of all processes, step by step: those of process 0, 1, ..., then the next step's.

    What is known of a batch in the last step is its own number of samples.

    Args:
        *args: Those of `IterableDatasetShard`.
        joined: Give the batches of one step as one.
        **kwargs: Those of `IterableDatasetShard`.
    """

    def __init__(self, *args: Any, joined: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.joined = joined

    @property
    def chunk(self) -> int:
        """Samples of a block of a dataset that divides itself over workers: there each makes its own."""
        return self.step_size if self.joined else self.share

    def _batches(
        self, group: list[Any], reading: Reading, layout: Layout, counts_rows: bool
    ) -> list[tuple[list[Any], StepRows | None]]:
        parts = layout.deal(group, reading.head, None)
        is_full = len(group) == layout.group
        real = (layout.share,) * len(parts) if is_full else layout.real_sizes(len(group))
        if self.joined and parts:
            parts, real = [list(chain(*parts))], (sum(real),)
        return [
            (samples, None if is_full else StepRows((count,), (len(samples),)))
            for samples, count in zip(parts, real, strict=False)
        ]

    def _layout_of_worker(self) -> Layout:
        # As of one process: a divided part is cut into the chunks that one worker gives in its turn.
        return Layout(self.chunk, 1, self.drop_last, self.even_batches)


class PresplitStream(IterableDatasetShard):
    """An iterable dataset that gives the samples of this process already.

    How many samples the others have is not known: nothing is padded.

    Args:
        dataset: The dataset.
        batch_size: Samples in a batch.
        drop_last: Drop the last batch if it is incomplete.
        part: (index, number) of the process that these samples are for.
    """

    def __init__(
        self, dataset: IterableDataset[Any], batch_size: int, drop_last: bool, part: tuple[int, int]
    ) -> None:
        # As for one process: this one's samples are all there is in the dataset.
        super().__init__(dataset, batch_size, drop_last, even_batches=False)
        self.part = part

    @property
    def step_size(self) -> int:
        """Samples of one step of all processes."""
        return self.share * self.part[1]

    @property
    def is_even(self) -> bool:
        """Whether every process gets as many batches: not known."""
        return False

    @property
    def chunk(self) -> int:
        """Samples of a block of a dataset that divides itself over workers."""
        return self.share

    def batches_of_each(self, start: int) -> tuple[int, ...] | None:
        """Return nothing: the number of samples of the others is not known."""
        return None


class BlockReader(IterableDataset[Any]):
    """Gives a loader whole batches of a shard, with what is known of their padding.

    Epoch and start reach the workers through shared memory, also when the workers live on between epochs.

    Args:
        shard: The shard.
        shared: Whether there are workers.
        place: Where the first pass starts, if it is in the middle of an epoch that another run has begun.
        counts_rows: See `IterableDatasetShard.blocks`.
    """

    def __init__(
        self,
        shard: IterableDatasetShard,
        shared: bool,
        place: StreamPosition | None = None,
        counts_rows: bool = False,
    ) -> None:
        self.shard = shard
        self.place = place
        self.counts_rows = counts_rows
        # Epoch (-1: as it is), samples to pass over, whether to start at the place, and whether to show the
        # first sample; one tensor, read by workers.
        where = torch.zeros(4, dtype=torch.int64, device="cpu")
        # Shared with workers alone: shared memory takes a file descriptor.
        self.where = where.share_memory_() if shared else where  # type: ignore[no-untyped-call]

    def seek(
        self, epoch: int | None, start: int, from_place: bool = False, shows_first: bool = False
    ) -> None:
        """Choose where the next pass starts.

        Args:
            epoch: Number of the epoch; None for the one that the dataset is in.
            start: Number of samples of its stream to pass over.
            from_place: Whether to start at the place instead.
            shows_first: See `IterableDatasetShard.blocks`.
        """
        self.where[0] = -1 if epoch is None else epoch
        self.where[1], self.where[2], self.where[3] = start, from_place, shows_first

    def __iter__(self) -> Iterator[Block]:
        epoch, start, from_place, shows_first = self.where.tolist()
        # A worker has a copy of the dataset; in the main process the loader has set the epoch.
        if epoch >= 0 and get_worker_info() is not None:
            self.shard.set_epoch(epoch)
        place = self.place if from_place else None
        return self.shard.blocks(start, place, self.counts_rows, bool(shows_first))


class CollateBlock:
    """Turns a block into (fill, batch, mark).

    Args:
        collate_fn: Makes the batch.
        batched: Whether it takes the list of samples; otherwise the block's one item.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool) -> None:
        self.collate_fn = collate_fn
        self.batched = batched

    def __call__(self, block: Block) -> tuple[StepRows | None, Any, StreamPosition | Mark | FirstSample]:
        """Return what is known of the step, the batch, and where the stream is after it."""
        samples = block.samples
        batch = self.collate_fn(samples if self.batched else samples[0]) if samples else None
        return block.fill, batch, block.mark


def _surely_before(number: int, reading: Reading) -> int:
    """Return how many batches of this worker come before batch `number` of all, whoever ends early."""
    return len(range(reading.worker, number, reading.num_workers)) if reading.divided else 0


def count_rows(item: Any) -> int:
    """Return the batch size of an item; 1 if it has none."""
    return ignorant_find_batch_size(item) or 1
