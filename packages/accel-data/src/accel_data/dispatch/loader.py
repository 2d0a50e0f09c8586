"""The loader for which process 0 reads the batches of all processes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from accel_data.checks import check_divisible
from accel_data.dispatch.channel import NO_BATCH, Message, Receiver, Sender
from accel_data.dispatch.sender import Connection, StepItems, send_step
from accel_data.dispatch.steps import ReadBatch, Step, StepBuilder, split_real_rows
from accel_data.loader.base import Unbatched, loader_settings
from accel_data.loader.iteration import Item, PreparedLoader, split_items, with_last_flag
from accel_data.loader.read_ahead import read_ahead
from accel_data.order.layout import EpochInfo, Layout, StepRows
from accel_data.order.mesh import find_data_ranks
from accel_data.order.samplers import AllShards, BatchSamplerShard
from accel_data.resume.cursor import EpochRun
from accel_data.stream.dataset import AllRanksStream, IterableDatasetShard, count_rows
from accel_ops.debug import check_collectives
from accel_ops.trees.tensors import slice_tensors
from accel_state.logging.warning import warn
from accel_state.process.info import ProcessInfo
from accel_state.process.state import current_process

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DataLoaderDispatcher(PreparedLoader):
    """A DataLoader that only process 0 reads, which sends each process its batches.

    Each process gets exactly the batches that it would read from a sharded loader: they are collated
    separately for each process. A process receives only its own batch, in one message, with its structure if
    that has changed. While a batch is used, a thread of process 0 reads and sends the next one (unless
    reading uses the global random generators, as what the user draws would depend on it).

    Args:
        dataset: The dataset. Only process 0 reads it.
        split_batches: Split every batch over the processes, instead of giving each process every n-th batch.
        skip_batches: Number of batches to skip at the beginning of every iteration.
        use_stateful_dataloader: Make this an instance of torchdata's StatefulDataLoader, too, which can
            exchange states with it.
        _drop_last: Whether an incomplete last step is dropped.
        _non_blocking: Do not wait for copies from pinned memory to the device.
        slice_fn: Slices the batch of one process out of a global batch; called as `slice_fn(batch, slice,
            process_index=..., num_processes=...)`. By default nothing is sliced, unless the dataset yields
            batches and they are split.
        torch_device_mesh: The device mesh of the processes; those that differ only along tp, cp and sp get
            the same batches.
        iteration: Number of the first epoch.
        even_batches: Pad an incomplete last step; see `prepare_data_loader`.
        num_processes: Number of data-parallel processes; those that run by default. With 1, and neither
            torch_device_mesh nor data_ranks, this process reads only for itself.
        data_ranks: The data-parallel rank of each process, if there is no torch_device_mesh.
        order_seed: Seeds the global generators while a sampler that may draw from them is iterated.
        **kwargs: Further arguments of `DataLoaderShard` (device, rng_types, synchronized_generator,
            gradient_state) and of `torch.utils.data.DataLoader`.

    Attributes:
        total_batch_size: Samples of one step over all processes.
        total_dataset_length: Length of the full dataset.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: DeviceMesh | None = None,
        iteration: int = 0,
        *,
        even_batches: bool = True,
        num_processes: int | None = None,
        data_ranks: Sequence[int] | None = None,
        order_seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._process = current_process()
        self._data_ranks = _data_ranks(self._process, torch_device_mesh, num_processes, data_ranks)
        self.num_processes = max(self._data_ranks) + 1
        self.split_batches = split_batches
        self.slice_fn = slice_fn
        self.even_batches = even_batches and self.num_processes > 1
        self._connection = Connection()
        # All of these before the next call, in which torch's loader uses the shard made from them.
        self._order_seed = order_seed
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            **kwargs,
        )
        if isinstance(dataset, IterableDataset) and self.batch_size is not None and split_batches:
            check_divisible(self.batch_size, self.num_processes)
            # torch forbids setting it on a loader.
            self.__dict__["batch_size"] = self.batch_size // self.num_processes
        if slice_fn is not None and self._unbatched and not split_batches:
            warn(
                "slice_fn is ignored: the dataset yields batches, and each process gets one of them. "
                "Pass split_batches=True to split every batch over the processes.",
            )

    def _num_batches(self) -> int:
        if self._shard is not None:
            return -(-len(self._shard) // self._shard.num_processes)
        count = 1 if self._sliced_items else self.num_processes
        layout = Layout(self.batch_size or 1, count, self.drop_last, self.even_batches)
        return layout.num_batches(self.total_dataset_length, 0)

    @property
    def _sliced_items(self) -> bool:
        """Whether each item of the dataset is a batch for all processes."""
        return self._unbatched and self.split_batches

    @property
    def _step_size(self) -> int:
        if self._shard is not None:
            return self._shard.step_size
        return (self.batch_size or 1) * (1 if self._sliced_items else self.num_processes)

    @property
    def _plain_batch_size(self) -> int:
        if self._shard is not None:
            return super()._plain_batch_size
        pieces = self.split_batches and self.batch_size is not None
        return (self.batch_size or 1) * (self.num_processes if pieces else 1)

    @property
    def _blocks_per_step(self) -> int:
        sliced = self.split_batches if self._unbatched else self.slice_fn is not None
        return 1 if sliced else self.num_processes

    def _make_shard(self, batch_sampler: Any, unbatched: bool = False) -> BatchSamplerShard:
        if self.split_batches and unbatched:
            return AllShards(batch_sampler, even_batches=self.even_batches, seed=self._order_seed)
        cut = self.num_processes, 0, self.split_batches, self.even_batches
        return AllShards(batch_sampler, *cut, balance_last_step=True, seed=self._order_seed)

    def _stream_shard(self) -> IterableDatasetShard:
        dataset: Any = self.dataset
        size = self.batch_size or 1
        if self.num_processes == 1 or self._sliced_items:
            return IterableDatasetShard(dataset, size, self.drop_last, even_batches=self.even_batches)
        place = self.num_processes, 0
        size *= self.num_processes if self.split_batches else 1
        options = {
            "even_batches": self.even_batches,
            "balance_last_step": True,
            "joins_step": self.slice_fn is not None,
        }
        return AllRanksStream(dataset, size, self.drop_last, *place, self.split_batches, **options)

    def _start_run(self) -> EpochRun:
        try:
            return super()._start_run()
        except Exception as error:
            if self._process.is_main and len(self._data_ranks) > 1 and dist.is_initialized():
                sender = self._connection.sender(self._data_ranks)
                sender.begin()
                sender.fail(error)
            raise

    def _read(self, run: EpochRun) -> tuple[Iterator[Any], EpochInfo]:
        # A single process: nothing is sent, and no process group is needed.
        if len(self._data_ranks) == 1:
            if self.slice_fn is None:
                return super()._read(run)
            return split_items((batches[0], step_rows, last) for batches, step_rows, last in self._steps(run))
        if not dist.is_initialized():
            raise RuntimeError(
                f"Process 0 cannot send batches to {self._process.world_size} processes: there is no "
                "process group. Call torch.distributed.init_process_group (or make a PartialState or an "
                "Accelerator) first, or pass dispatch_batches=False."
            )
        return split_items(self._start_sending(run) if self._process.is_main else self._start_receiving(run))

    def _start_sending(self, run: EpochRun) -> Generator[Item, None, None]:
        """Start reading and sending."""
        sender = self._connection.sender(self._data_ranks)
        # Before anything is read, so that errors reach the other processes.
        number = sender.begin()
        try:
            steps = self._steps(run)
        except Exception as error:
            sender.fail(error)
            raise
        sent = read_ahead(partial(send_step, steps, sender, self.num_workers), self._process.device)
        # The next run closes it first: two runs must not read or send at the same time.
        self._connection.reading = sent
        return self._send_all(sent, sender, number)

    def _send_all(
        self, steps: Generator[Message, None, None], sender: Sender, number: int
    ) -> Generator[Item, None, None]:
        try:
            while True:
                self._check(sender, number)
                step = next(steps, None)
                if step is None:
                    return
                yield step
                if step.last:
                    return
        finally:
            steps.close()
            # Otherwise a newer run has begun and uses the connection.
            if sender.number == number:
                sender.close()

    def _start_receiving(self, run: EpochRun) -> Generator[Item, None, None]:
        """Start receiving."""
        receiver = self._connection.receiver(self._data_ranks)
        number = receiver.begin()
        if self.generator is None and not run.resumed:
            # Process 0 draws a seed for its workers here: keep the global generators equal.
            torch.empty((), dtype=torch.int64, device="cpu").random_()
        return self._receive_all(receiver, number)

    def _receive_all(self, receiver: Receiver, number: int) -> Generator[Item, None, None]:
        while True:
            self._check(receiver, number)
            message = receiver.receive()
            if message is None:
                return
            yield message
            if message.last:
                return

    def _check(self, end: Sender | Receiver, number: int) -> None:
        if end.number != number:
            raise RuntimeError(
                "Another iteration over this loader began while this one went on, and process 0 sends "
                "batches for one at a time. Prepare a second loader, or pass dispatch_batches=False."
            )
        # A collective of debug mode: all processes call it before each batch.
        if self._process.debug:
            check_collectives.check("dispatch", None, process=self._process)

    def _steps(self, run: EpochRun) -> Iterator[StepItems]:
        """Start reading the steps of a run: batches, sizes, and whether it is the last one."""
        size = self.batch_size if self._shard is None else self._shard.local_batch_size
        size = None if self._unbatched else size
        slice_fn = self.slice_fn
        if self._unbatched:
            slice_fn = (slice_fn or slice_tensors) if self.split_batches else None
        # A sampler has already padded its last step, except for items of unknown size.
        even = self.even_batches if self._shard is None else self._unbatched and self._shard.even_batches
        builder = StepBuilder(self.num_processes, size, even, self._drop_last, slice_fn)
        steps: Iterator[StepItems]
        if self._shard is None:
            stream = self._stream(run, self._stream_shard())
            reads = (ReadBatch(batch, step_rows) for batch, step_rows in stream)
            steps = with_last_flag(builder.of(reads))
        else:
            built = builder.of(ReadBatch(batch, None) for batch in self._read_map_style(run))
            steps = self._with_padding(built, self._shard, self._shard.epoch_info)
        return ((batches, step_rows and StepRows.of(*step_rows), last) for batches, step_rows, last in steps)

    def _with_padding(
        self, steps: Iterator[Step], shard: BatchSamplerShard, info: EpochInfo
    ) -> Iterator[StepItems]:
        if not shard.has_length:
            items: Iterator[StepItems] = with_last_flag(steps)
        else:
            # Evaluated after the first step has been read: then the sampler has counted its batches.
            items = (
                (*step, number * shard.num_processes >= (info.num_batches or 0))
                for number, step in enumerate(steps, 1)
            )
        for batches, step_rows, last in items:
            actual_rows = (
                self._last_step_rows(Step(batches, step_rows), info.last_rows)
                if last and info.last_rows
                else step_rows
            )
            yield batches, actual_rows, last

    def _read_map_style(self, run: EpochRun) -> Iterator[Any]:
        """Read a map-style dataset: the batches of all ranks in turn, or joined if they are sliced later."""
        shard = self._shard
        assert isinstance(shard, AllShards)
        if self._reader is None:
            if isinstance(self.sampler, Unbatched):
                sampling: dict[str, Any] = {"batch_size": None, "sampler": self.sampler}
            else:
                name = "batch_sampler" if self.batch_sampler is not None else "sampler"
                sampling = {name: JoinedBatches(shard, self.num_processes) if self.slice_fn else shard}
                sampling |= {} if name == "batch_sampler" else {"batch_size": None}
            # Kept for the next run, for persistent workers.
            self._reader = DataLoader(self.dataset, **sampling, **loader_settings(self))
        return self._open(self._reader, run)

    @property
    def _counts_items(self) -> bool:
        return False

    def _last_step_rows(self, step: Step, sampler_rows: StepRows) -> StepRows:
        """Return the sizes in the last step, from those known to the sampler."""
        if self.slice_fn is not None and step.step_rows:
            rows = step.step_rows.rows
            return StepRows(split_real_rows(sum(sampler_rows.real), rows), rows)
        if not self._unbatched:
            return sampler_rows
        rows = tuple(0 if batch is NO_BATCH else count_rows(batch) for batch in step.batches)
        real_rows = tuple(size if real else 0 for size, real in zip(rows, sampler_rows.real, strict=True))
        return StepRows(real_rows, rows)


class JoinedBatches:
    """The batches of all ranks of each step, joined into one.

    Args:
        shard: Yields the batches of all ranks in turn.
        count: Number of batches per step.
    """

    def __init__(self, shard: AllShards, count: int) -> None:
        self.shard = shard
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator: iter() makes the information about this epoch, which the loader reads immediately.
        return self._joined(iter(self.shard))

    def _joined(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        while group := list(islice(batches, self.count)):
            yield [index for batch in group for index in batch]


def _data_ranks(
    process: ProcessInfo, mesh: DeviceMesh | None, num_processes: int | None, data_ranks: Sequence[int] | None
) -> list[int]:
    """Return the data-parallel rank of each process of the run; [0] for a single process."""
    if num_processes == 1 and mesh is None and data_ranks is None:
        return [0]
    ranks = find_data_ranks(process.world_size, mesh, data_ranks)
    size = max(ranks.values()) + 1
    if num_processes not in (None, size):
        raise ValueError(
            f"Batches cannot be sent to num_processes={num_processes}: process 0 has {size} to serve. Leave "
            "num_processes out, pass data_ranks to say which processes get the same batches, or pass "
            "dispatch_batches=False."
        )
    # A process outside the mesh would wait for batches forever.
    if sorted(ranks) != list(range(process.world_size)):
        raise ValueError(
            f"torch_device_mesh has the processes {sorted(ranks)}, but {process.world_size} processes run: "
            "process 0 can only send batches to all of them. Pass the full mesh, or "
            "dispatch_batches=False."
        )
    return [ranks[rank] for rank in range(process.world_size)]
