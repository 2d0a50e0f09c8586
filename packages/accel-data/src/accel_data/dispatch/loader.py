"""The loader whose batches process 0 reads for all processes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from accel_data.checks import check_divides
from accel_data.dispatch.channel import ABSENT, Message, Receiver, Sender
from accel_data.dispatch.sender import Link, Parts, hand_out
from accel_data.dispatch.steps import Read, Round, Rounds, real_in
from accel_data.loader.base import Unbatched, loader_settings
from accel_data.loader.iteration import Item, PreparedLoader, look_ahead, noted
from accel_data.loader.read_ahead import read_ahead
from accel_data.order.layout import Layout, Share, StepRows
from accel_data.order.mesh import find_data_ranks
from accel_data.order.samplers import AllShards, BatchSamplerShard
from accel_data.resume.cursor import Pass
from accel_data.stream.dataset import IterableDatasetShard, WholeStream, count_rows
from accel_ops.debug import check_collectives
from accel_ops.trees.tensors import slice_tensors
from accel_state.logging.warning import warn
from accel_state.process.info import ProcessInfo
from accel_state.process.state import current_process

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DataLoaderDispatcher(PreparedLoader):
    """A DataLoader that is read by process 0 alone, which hands each process its batches.

    Each process gets exactly what it would read by itself from a loader that shares out: batches are collated
    one by one for their process. A process is sent its own batch only, in one message, with its structure
    when that has changed. While a batch is used, a thread of process 0 reads and sends the next one (unless
    reading uses the global random generators, so that what the user draws would depend on it).

    Args:
        dataset: The dataset. Only process 0 reads it.
        split_batches: Give each process a piece of every batch, not every n-th batch.
        skip_batches: Number of batches to leave out at the beginning of every iteration.
        use_stateful_dataloader: Be an instance of torchdata's StatefulDataLoader, too, and exchange states
            with it.
        _drop_last: Whether an incomplete last step is dropped.
        _non_blocking: Do not wait for copies from pinned memory to the device.
        slice_fn: Takes the part of one process out of a batch for all of them; called as `slice_fn(batch,
            slice, process_index=..., num_processes=...)`. By default nothing is sliced, unless the dataset
            gives whole batches and they are split.
        torch_device_mesh: The mesh that the processes form; those that differ only along tp, cp and sp get
            the same batches.
        iteration: Number of the first epoch.
        even_batches: Complete an incomplete last step; see `prepare_data_loader`.
        num_processes: Number of data-parallel processes; those that run by default. With 1, and neither
            torch_device_mesh nor data_ranks, this process reads for itself alone.
        data_ranks: The data-parallel rank of each process, where torch_device_mesh does not say it.
        order_seed: Seeds the global generators while a sampler that may draw from them is walked.
        **kwargs: Further arguments of `DataLoaderShard` (device, rng_types, synchronized_generator,
            gradient_state) and of `torch.utils.data.DataLoader`.

    Attributes:
        total_batch_size: Samples of one step, all processes together.
        total_dataset_length: Length of the dataset, all processes together.
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
        self._owners = _owners(self._process, torch_device_mesh, num_processes, data_ranks)
        self.num_processes = max(self._owners) + 1
        self.split_batches = split_batches
        self.slice_fn = slice_fn
        self.even_batches = even_batches and self.num_processes > 1
        self._link = Link()
        # All of these before the next call, in which torch's loader asks for the shard that is made of
        # them.
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
            check_divides(self.batch_size, self.num_processes)
            # torch forbids to set it on a loader.
            self.__dict__["batch_size"] = self.batch_size // self.num_processes
        if slice_fn is not None and self._unbatched and not split_batches:
            warn(
                "slice_fn is ignored: the dataset gives whole batches, and each process gets one of them. "
                "Pass split_batches=True to divide every batch over the processes.",
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
        return AllShards(batch_sampler, *cut, spread=True, seed=self._order_seed)

    def _stream_shard(self) -> IterableDatasetShard:
        dataset: Any = self.dataset
        size = self.batch_size or 1
        if self.num_processes == 1 or self._sliced_items:
            return IterableDatasetShard(dataset, size, self.drop_last, even_batches=self.even_batches)
        place = self.num_processes, 0
        size *= self.num_processes if self.split_batches else 1
        options = {"even_batches": self.even_batches, "spread": True, "joined": self.slice_fn is not None}
        return WholeStream(dataset, size, self.drop_last, *place, self.split_batches, **options)

    def _start_pass(self) -> Pass:
        try:
            return super()._start_pass()
        except Exception as error:
            if self._process.is_main and len(self._owners) > 1 and dist.is_initialized():
                sender = self._link.sender(self._owners)
                sender.begin()
                sender.fail(error)
            raise

    def _read(self, started: Pass) -> tuple[Iterator[Any], Share]:
        # One process by itself: nothing is sent, and a process group need not be there.
        if len(self._owners) == 1:
            if self.slice_fn is None:
                return super()._read(started)
            return noted((parts[0], fill, last) for parts, fill, last in self._rounds(started))
        if not dist.is_initialized():
            raise RuntimeError(
                f"Process 0 cannot hand out batches to {self._process.world_size} processes: there is no "
                "process group. Call torch.distributed.init_process_group (or make a PartialState or an "
                "Accelerator) first, or pass dispatch_batches=False."
            )
        return noted(self._lead(started) if self._process.is_main else self._follow(started))

    def _lead(self, started: Pass) -> Generator[Item, None, None]:
        """Start to read and hand out."""
        sender = self._link.sender(self._owners)
        # Before anything is read, so that the others get an error as well.
        number = sender.begin()
        try:
            rounds = self._rounds(started)
        except Exception as error:
            sender.fail(error)
            raise
        steps = read_ahead(partial(hand_out, rounds, sender, self.num_workers), self._process.device)
        # The next pass closes it first: two of them must not read, or send, side by side.
        self._link.reading = steps
        return self._handed_out(steps, sender, number)

    def _handed_out(
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
            # Otherwise a newer pass has begun, and the way belongs to it.
            if sender.number == number:
                sender.leave()

    def _follow(self, started: Pass) -> Generator[Item, None, None]:
        """Start to get what is handed out."""
        receiver = self._link.receiver(self._owners)
        number = receiver.begin()
        if self.generator is None and not started.resumed:
            # Process 0 draws a seed for its workers here: the global generators stay alike.
            torch.empty((), dtype=torch.int64, device="cpu").random_()
        return self._received(receiver, number)

    def _received(self, receiver: Receiver, number: int) -> Generator[Item, None, None]:
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
                "Another iteration over this loader began while this one went on, and process 0 hands out "
                "batches for one at a time. Prepare a second loader, or pass dispatch_batches=False."
            )
        # A collective of debug mode: every process calls it before each batch.
        if self._process.debug:
            check_collectives.check("dispatch", None, process=self._process)

    def _rounds(self, started: Pass) -> Iterator[Parts]:
        """Start to read the steps of a pass: the parts, the padding, and whether it is the last one."""
        size = self.batch_size if self._shard is None else self._shard.local_batch_size
        size = None if self._unbatched else size
        slice_fn = self.slice_fn
        if self._unbatched:
            slice_fn = (slice_fn or slice_tensors) if self.split_batches else None
        # A sampler has completed its last step already, but for items of which it does not know the size.
        even = self.even_batches if self._shard is None else self._unbatched and self._shard.even_batches
        rounds = Rounds(self.num_processes, size, even, self._drop_last, slice_fn)
        steps: Iterator[Parts]
        if self._shard is None:
            stream = self._stream(started, self._stream_shard())
            reads = (Read(batch, fill) for batch, fill in stream)
            steps = look_ahead(rounds.of(reads))
        else:
            found = rounds.of(Read(batch, None) for batch in self._indexed(started))
            steps = self._padded(found, self._shard, self._shard.share)
        return ((parts, fill and StepRows.of(*fill), last) for parts, fill, last in steps)

    def _padded(self, rounds: Iterator[Round], shard: BatchSamplerShard, share: Share) -> Iterator[Parts]:
        if not shard.has_length:
            steps: Iterator[Parts] = look_ahead(rounds)
        else:
            # Asked for after the first round has been read: then the sampler has counted its batches.
            steps = (
                (*found, number * shard.num_processes >= (share.num_batches or 0))
                for number, found in enumerate(rounds, 1)
            )
        for parts, fill, last in steps:
            known = self._padding(Round(parts, fill), share.last) if last and share.last else fill
            yield parts, known, last

    def _indexed(self, started: Pass) -> Iterator[Any]:
        """Read a map-style dataset: the batches of all processes in turn, or joined if sliced later."""
        shard = self._shard
        assert isinstance(shard, AllShards)
        if self._reads is None:
            if isinstance(self.sampler, Unbatched):
                sampling: dict[str, Any] = {"batch_size": None, "sampler": self.sampler}
            else:
                name = "batch_sampler" if self.batch_sampler is not None else "sampler"
                sampling = {name: JoinedBatches(shard, self.num_processes) if self.slice_fn else shard}
                sampling |= {} if name == "batch_sampler" else {"batch_size": None}
            # Kept for the next pass, so that persistent workers live on.
            self._reads = DataLoader(self.dataset, **sampling, **loader_settings(self))
        return self._open(self._reads, started)

    @property
    def _counts_items(self) -> bool:
        return False

    def _padding(self, found: Round, known: StepRows) -> StepRows:
        """Return what the processes have in the last step, from what the sampler knows of it."""
        if self.slice_fn is not None and found.fill:
            rows = found.fill.rows
            return StepRows(real_in(sum(known.real), rows), rows)
        if not self._unbatched:
            return known
        rows = tuple(0 if part is ABSENT else count_rows(part) for part in found.parts)
        return StepRows(tuple(size if real else 0 for size, real in zip(rows, known.real, strict=True)), rows)


class JoinedBatches:
    """The batches of all processes of each step, joined to one.

    Args:
        shard: Gives the batches of all processes in turn.
        count: How many make a step.
    """

    def __init__(self, shard: AllShards, count: int) -> None:
        self.shard = shard
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator itself: iter() makes the share of this pass, which the loader reads right away.
        return self._joined(iter(self.shard))

    def _joined(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        while group := list(islice(batches, self.count)):
            yield [index for batch in group for index in batch]


def _owners(
    process: ProcessInfo, mesh: DeviceMesh | None, num_processes: int | None, data_ranks: Sequence[int] | None
) -> list[int]:
    """Return for each process of the run which data-parallel rank it has; [0] for a process by itself."""
    if num_processes == 1 and mesh is None and data_ranks is None:
        return [0]
    ranks = find_data_ranks(process.world_size, mesh, data_ranks)
    parts = max(ranks.values()) + 1
    if num_processes not in (None, parts):
        raise ValueError(
            f"Batches cannot be handed out to num_processes={num_processes}: process 0 has {parts} to serve. "
            "Leave num_processes out, say by data_ranks which processes get the same batches, or pass "
            "dispatch_batches=False."
        )
    # A process that is in no part would wait for batches for ever.
    if sorted(ranks) != list(range(process.world_size)):
        raise ValueError(
            f"torch_device_mesh has the processes {sorted(ranks)}, but {process.world_size} processes run: "
            "process 0 can only hand out batches to all of them. Pass the whole mesh, or "
            "dispatch_batches=False."
        )
    return [ranks[rank] for rank in range(process.world_size)]
