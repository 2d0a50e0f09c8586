"""One iteration over a prepared loader, whoever reads the batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from accel_data.checks import check_skip, explained
from accel_data.loader.base import DataLoaderAdapter
from accel_data.loader.mixin import DataLoaderStateMixin
from accel_data.loader.prefetch import SideStream, copied_ahead
from accel_data.loader.uneven import ExhaustedRank, UnevenLoaderMonitor
from accel_data.order.layout import Share, StepRows
from accel_data.resume.cursor import Pass
from accel_data.stream.dataset import count_rows
from accel_ops.rng import synchronize_rng_states
from accel_ops.trees.send import send_to_device
from accel_state.enums import RNGType
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.gradient import GradientState

Item = tuple[Any, StepRows | None, bool]
"""A batch, what the processes have in its step, and whether it is the last one."""

_WarnOfUneven = Callable[[tuple[int, ...] | None], None]
_WarnOfMissing = Callable[[ExhaustedRank], None]


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """Base of loaders that read by themselves and of those that get their batches from process 0.

    Its arguments are those of `DataLoaderShard`.

    Attributes:
        uneven_monitor: Tracks which ranks have run out of batches, where each rank reads data of its own and
            does not know how many batches the other ranks have; None for other loaders.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: DeviceMesh | None = None,
        iteration: int = 0,
        *,
        gradient_state: GradientState | None = None,
        **kwargs: Any,
    ) -> None:
        DataLoaderAdapter.__init__(self, dataset, use_stateful_dataloader, **kwargs)
        DataLoaderStateMixin.__init__(self)
        if gradient_state is not None:
            self.gradient_state = gradient_state
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.uneven_monitor: UnevenLoaderMonitor | None = None
        self._warn_of_uneven: _WarnOfUneven | None = None
        self._warn_of_missing: _WarnOfMissing | None = None
        self.skip_batches = check_skip(skip_batches)
        self.torch_device_mesh = torch_device_mesh
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._progress.set_epoch(iteration)

    def set_warnings(self, uneven: _WarnOfUneven, missing: _WarnOfMissing) -> None:
        """Choose what is called where processes get different numbers of batches.

        Args:
            uneven: Called when a pass begins in which some processes get fewer batches than others, or may do
                so: with the number of batches of each process, or None where that is not known.
            missing: Called in a step in which a process is known to have no batch, on the first process that
                finds it.
        """
        self._warn_of_uneven, self._warn_of_missing = uneven, missing

    def set_uneven_monitor(self, uneven_monitor: UnevenLoaderMonitor) -> None:
        """Note in the process group's store who has left a pass.

        Args:
            uneven_monitor: See the class.
        """
        self.uneven_monitor = uneven_monitor

    def set_sample_seed(self, seed: int) -> None:
        """Choose what the seeds of single samples are made of, where the order has no seed.

        Args:
            seed: The seed.
        """
        self._progress.sample_seed = seed

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        device, non_blocking = self.device, self._non_blocking
        # None on the CPU, and on devices whose runtime has no streams.
        side = None if device is None else SideStream.of(device, non_blocking)
        started = self._start_pass()
        # After the pass has started: a loader that could not start is not the active one.
        self.begin()
        uneven_monitor, warned, exhausted = self.uneven_monitor, False, False
        if uneven_monitor is not None:
            uneven_monitor.begin()
        batches: Iterator[Any] = iter(())
        share, fill = Share(), None
        try:
            if not started.begin.ended:
                batches, share = self._read(started)
            if self._warn_of_uneven is not None and uneven_monitor is None:
                self._check_uneven(self._warn_of_uneven, started)
            taken = batches if side is None else copied_ahead(batches, share, side)
            for step, batch in enumerate(taken, 1):
                started.steps = step
                # Most steps are full, and cost this comparison alone.
                if step == share.num_batches or share.now is not fill:
                    last = step == share.num_batches
                    fill = share.last if last else share.now
                    self._mark(batch, fill, last)
                    started.ended = last and self._ends_for_all(started)
                if uneven_monitor is not None:
                    # Before the batch is used: whoever waits in its collectives can see who has left.
                    uneven_monitor.record(step, last=step == share.num_batches)
                    warned = warned or self._finds_missing(uneven_monitor)
                self.gradient_state._record_batch(self)
                yield batch if device is None else send_to_device(batch, device, non_blocking)
            exhausted = True
            self._check_something(started)
        # A worker that died is seen only by what its queues and shared memory raise.
        except (OSError, EOFError) as raised:
            # A worker that was killed for memory shows only as a broken pipe.
            error = explained(raised, self.num_workers)
            if error is raised:
                raise
            raise error from raised
        finally:
            if isinstance(batches, Generator):  # what reads ahead ends now
                batches.close()
            self._progress.finish(started, exhausted)
            if uneven_monitor is not None:
                uneven_monitor.end(exhausted)
            self.end()

    def _ends_for_all(self, started: Pass) -> bool:
        """Whether no process has a batch after this process's last one."""
        shard = self._shard
        # A loader of its own part ends by itself, whatever the others have.
        alike = shard is None or shard.is_even or self._progress.part is not None
        counts = None if alike or shard is None else shard.batches_of_each
        return counts is None or started.steps == max(counts)

    def _check_something(self, started: Pass) -> None:
        """Warn if no process got anything, as a loaded state or skipping wanted to go on beyond the end."""
        begin = started.begin
        if started.steps or not begin.batches:
            return
        if not started.loaded:
            self._check_skip_fits(begin.epoch)
            return
        others = None if self._shard is None or begin.ended else self._shard.batches_of_each
        if not any(others or ()):
            warn(
                f"Nothing is left of epoch {begin.epoch} after its first {begin.batches} batches "
                f"({begin.consumed} samples of all processes), from where the loaded state, or skipping "
                "after it, wanted to go on. The next pass is the next epoch.",
            )

    def _check_skip_fits(self, epoch: int) -> None:
        """Warn if more batches are skipped than there are."""
        count = self._known_batches()
        if count is None or self.skip_batches > count:
            have = f"the loader has {'no more' if count is None else count}"
            warn(
                f"Nothing is left of epoch {epoch} after skipping {self.skip_batches} batches: {have}. This "
                "pass was empty, and the next pass is the next epoch.",
            )

    def _check_uneven(self, warn_of_uneven: _WarnOfUneven, started: Pass) -> None:
        shard = self._stream_shard() if self._shard is None else self._shard
        if not shard.is_even:
            counts = self._batches_of_each(started)
            if counts is None or len(set(counts)) > 1:
                warn_of_uneven(counts)

    def _finds_missing(self, uneven_monitor: UnevenLoaderMonitor) -> bool:
        """Warn if a process is known to have no batch in this step; returns whether one is."""
        missing = None if self._warn_of_missing is None else uneven_monitor.exhausted_rank()
        if missing is not None and self._warn_of_missing is not None and uneven_monitor.is_first_to_warn():
            self._warn_of_missing(missing)
        return missing is not None

    def _batches_of_each(self, started: Pass) -> tuple[int, ...] | None:
        """Number of batches of each process in a pass; None where it is not known."""
        if self._shard is not None:
            return self._shard.batches_of_each
        if self.num_workers or self._unbatched:  # the stream may divide itself; items may be divided
            return None
        return self._stream_shard().batches_of_each(started.begin.consumed)

    def _read(self, started: Pass) -> tuple[Iterator[Any], Share]:
        """Return the batches of a pass, and what will be known of them."""
        if self._shard is None:
            return noted_ahead(self._stream(started, self._stream_shard()), Share())
        batches = self._open(self, started)
        share = self._shard.share
        if self._shard.has_length:
            return batches, share
        return noted_ahead(((batch, None) for batch in batches), share)

    def _start_pass(self) -> Pass:
        generator = self.synchronized_generator
        try:
            started = self._progress.start(self.skip_batches, self._skips_all(), self._step_size, self._limit)
            self._set_inner_epoch(started.begin.epoch)
            if self._shard is not None:
                self._shard.set_start(started.begin.consumed, started.begin.order)
            if generator is not None and started.begin.generator is not None:
                generator.set_state(started.begin.generator)
        except Exception:
            self._synchronize()  # the others wait for this process there
            raise
        self._synchronize()
        started.generator = None if generator is None else generator.get_state()
        return started

    def _skips_all(self) -> bool:
        # Only where something is skipped, as a length may take long to find.
        count = self._known_batches() if self.skip_batches else None
        return count is not None and self.skip_batches >= count

    def _known_batches(self) -> int | None:
        try:
            return self._num_batches()
        except TypeError:  # a stream, or a sampler, without a length
            return None

    def _synchronize(self) -> None:
        """Make random generators those of process 0."""
        generator = self.synchronized_generator
        types = [kind for kind in self.rng_types or () if kind != RNGType.GENERATOR or generator is not None]
        if types:
            synchronize_rng_states(types, generator)

    @property
    def _counts_items(self) -> bool:
        """Whether steps are counted in items of the dataset that go out as they are."""
        return self._unbatched and self._shard is not None

    def _known_remainder(self) -> int:
        real, total = None if self._shard is None else self._shard.num_real, self.total_batch_size
        return -1 if self._drop_last or real is None or total is None else real % total

    def _mark(self, batch: Any, fill: StepRows | None, last: bool) -> None:
        if fill is not None and self._counts_items:  # what items of the others hold is not known
            rows = count_rows(batch)
            fill = StepRows(*(tuple(rows * count for count in counts) for counts in fill))
        self.real_samples, self.batch_rows = fill or (None, None)
        self.end_of_dataloader = last
        if last and self.remainder == -1:
            self.remainder = self._counted_remainder(batch) if fill is None else sum(fill.real)

    def _counted_remainder(self, batch: Any) -> int:
        """Return the remainder that the last batch tells: of one process and a batch sampler of any class."""
        size = self.total_batch_size
        if self._shard is None or self._drop_last or size is None or size != self.batch_size:
            return -1
        return count_rows(batch) % size


def noted(items: Generator[Item, None, None]) -> tuple[Iterator[Any], Share]:
    """Take the batches out of items, and note in a share what else they hold."""
    share = Share()

    def batches() -> Iterator[Any]:
        with closing(items):
            for number, (batch, fill, last) in enumerate(items, 1):
                share.now = fill
                if last:
                    share.num_batches, share.last = number, fill
                yield batch

    return batches(), share


def noted_ahead(batches: Iterator[tuple[Any, StepRows | None]], share: Share) -> tuple[Iterator[Any], Share]:
    """Take the batches out of (batch, fill), and find out by reading one ahead which is the last one.

    Args:
        batches: What is read.
        share: Gets what is known of them. It may know the padding of the last one before.
    """

    def handed_on() -> Iterator[Any]:  # one generator for both: each costs, for every batch
        number = 1
        present = next(batches, None)
        for following in batches:
            assert present is not None
            number += 1
            share.now = present[1]
            yield present[0]
            present = following
        if present is not None:
            share.num_batches = number
            share.last = share.last or present[1]
            yield present[0]

    return handed_on(), share


def look_ahead(batches: Iterator[tuple[Any, StepRows | None]]) -> Generator[Item, None, None]:
    """Say with each batch whether it is the last one, by reading one ahead."""
    present = next(batches, None)
    if present is None:
        return
    for following in batches:
        yield (*present, False)
        present = following
    yield (*present, True)
