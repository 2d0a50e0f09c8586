"""Iteration over a prepared loader, whichever process reads the batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from accel_data.checks import check_skip, explain_worker_error
from accel_data.loader.base import DataLoaderAdapter
from accel_data.loader.mixin import DataLoaderStateMixin
from accel_data.loader.prefetch import SideStream, copy_ahead
from accel_data.loader.uneven import ExhaustedRank, UnevenLoaderMonitor
from accel_data.order.layout import EpochInfo, StepRows
from accel_data.resume.cursor import EpochRun
from accel_data.stream.dataset import count_rows
from accel_ops.rng import synchronize_rng_states
from accel_ops.trees.send import send_to_device
from accel_state.enums import RNGType
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.gradient import GradientState

Item = tuple[Any, StepRows | None, bool]
"""A batch, the sizes in its step, and whether it is the last one."""

_WarnUneven = Callable[[tuple[int, ...] | None], None]
_WarnExhausted = Callable[[ExhaustedRank], None]


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """Base class of loaders that read their own shard and of those that get batches from process 0.

    Its arguments are those of `DataLoaderShard`.

    Attributes:
        uneven_monitor: Tracks which ranks have run out of batches, where each rank reads its own data and
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
        self._warn_uneven: _WarnUneven | None = None
        self._warn_exhausted: _WarnExhausted | None = None
        self.skip_batches = check_skip(skip_batches)
        self.torch_device_mesh = torch_device_mesh
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._progress.set_epoch(iteration)

    def set_warnings(self, uneven: _WarnUneven, missing: _WarnExhausted) -> None:
        """Set the warnings for processes with different numbers of batches.

        Args:
            uneven: Called when an iteration begins in which some processes get, or may get, fewer batches
                than others: with the number of batches of each process, or None if unknown.
            missing: Called in a step in which a process is known to have no batch, on the first process that
                detects it.
        """
        self._warn_uneven, self._warn_exhausted = uneven, missing

    def set_uneven_monitor(self, uneven_monitor: UnevenLoaderMonitor) -> None:
        """Track in the process group's store which ranks have run out of batches.

        Args:
            uneven_monitor: See the class.
        """
        self.uneven_monitor = uneven_monitor

    def set_sample_seed(self, seed: int) -> None:
        """Set the seed from which those of single samples are derived, if the order has no seed.

        Args:
            seed: The seed.
        """
        self._progress.sample_seed = seed

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        device, non_blocking = self.device, self._non_blocking
        # None on the CPU, and on devices without streams.
        side = None if device is None else SideStream.of(device, non_blocking)
        run = self._start_run()
        # After the start: a loader that could not start must not become the active one.
        self.begin()
        uneven_monitor, has_warned, exhausted = self.uneven_monitor, False, False
        if uneven_monitor is not None:
            uneven_monitor.begin()
        batches: Iterator[Any] = iter(())
        info, step_rows = EpochInfo(), None
        try:
            if (events := self.gradient_state.events) is not None:
                for notify in (*events.loader_started, *events.before_batch):
                    notify(self)
            if not run.begin.ended:
                batches, info = self._read(run)
            if self._warn_uneven is not None and uneven_monitor is None:
                self._check_uneven(self._warn_uneven, run)
            moved = batches if side is None else copy_ahead(batches, info, side)
            for step, batch in enumerate(moved, 1):
                run.steps = step
                # Most steps are full and cost only this comparison.
                if step == info.num_batches or info.current_rows is not step_rows:
                    last = step == info.num_batches
                    step_rows = info.last_rows if last else info.current_rows
                    self._update_step(batch, step_rows, last)
                    run.ended = last and self._ends_for_all(run)
                if uneven_monitor is not None:
                    # Before the batch is used: a rank that waits in its collectives can see who has left.
                    uneven_monitor.record(step, last=step == info.num_batches)
                    has_warned = has_warned or self._check_exhausted(uneven_monitor)
                self.gradient_state._record_batch(self)
                # Not kept here while the loop has it: batches may be large.
                if (events := self.gradient_state.events) is None:
                    yield batch if device is None else send_to_device(batch, device, non_blocking)
                else:
                    yield events.publish_batch(
                        self, batch if device is None else send_to_device(batch, device, non_blocking)
                    )
                if (events := self.gradient_state.events) is not None:
                    for notify in events.before_batch:
                        notify(self)
            exhausted = True
            self._warn_if_empty(run)
        # A dead worker shows only by the errors of its queues and shared memory.
        except (OSError, EOFError) as raised:
            # A worker killed for using too much memory shows as a broken pipe.
            error = explain_worker_error(raised, self.num_workers)
            if error is raised:
                raise
            raise error from raised
        finally:
            if isinstance(batches, Generator):  # stop reading ahead now
                batches.close()
            self._progress.finish(run, exhausted)
            if uneven_monitor is not None:
                uneven_monitor.end(exhausted)
            self.end()
            if (events := self.gradient_state.events) is not None:
                for notify in events.loader_ended:
                    notify(self)

    def _ends_for_all(self, run: EpochRun) -> bool:
        """Whether no rank has a batch after this rank's last one."""
        shard = self._shard
        # A loader over its own shard ends by itself, whatever the other ranks have.
        is_even = shard is None or shard.is_even or self._progress.pre_shard is not None
        counts = None if is_even or shard is None else shard.batches_per_rank
        return counts is None or run.steps == max(counts)

    def _warn_if_empty(self, run: EpochRun) -> None:
        """Warn if no rank got a batch because a loaded state or skipping pointed beyond the end."""
        begin = run.begin
        if run.steps or not begin.batches:
            return
        if not run.loaded:
            self._check_skip_fits(begin.epoch)
            return
        others = None if self._shard is None or begin.ended else self._shard.batches_per_rank
        if not any(others or ()):
            warn(
                f"Nothing is left of epoch {begin.epoch} after its first {begin.batches} batches "
                f"({begin.consumed} samples of all processes), where the loaded state, or skipping after it, "
                "would continue. The next iteration is the next epoch.",
            )

    def _check_skip_fits(self, epoch: int) -> None:
        """Warn if more batches are skipped than there are."""
        count = self._num_batches_if_known()
        if count is None or self.skip_batches > count:
            have = f"the loader has {'no more' if count is None else count}"
            warn(
                f"Nothing is left of epoch {epoch} after skipping {self.skip_batches} batches: {have}. This "
                "iteration was empty, and the next one is the next epoch.",
            )

    def _check_uneven(self, warn_of_uneven: _WarnUneven, run: EpochRun) -> None:
        shard = self._stream_shard() if self._shard is None else self._shard
        if not shard.is_even:
            counts = self._batches_per_rank(run)
            if counts is None or len(set(counts)) > 1:
                warn_of_uneven(counts)

    def _check_exhausted(self, uneven_monitor: UnevenLoaderMonitor) -> bool:
        """Warn if a rank is known to have no batch in this step; return whether one is."""
        missing = None if self._warn_exhausted is None else uneven_monitor.exhausted_rank()
        if missing is not None and self._warn_exhausted is not None and uneven_monitor.is_first_to_warn():
            self._warn_exhausted(missing)
        return missing is not None

    def _batches_per_rank(self, run: EpochRun) -> tuple[int, ...] | None:
        """Number of batches of each rank in an iteration; None if unknown."""
        if self._shard is not None:
            return self._shard.batches_per_rank
        if self.num_workers or self._unbatched:  # workers may split the stream; items may be split
            return None
        return self._stream_shard().batches_per_rank(run.begin.consumed)

    def _read(self, run: EpochRun) -> tuple[Iterator[Any], EpochInfo]:
        """Return the batches of an iteration, and the information that is set while iterating."""
        if self._shard is None:
            return split_items_ahead(self._stream(run, self._stream_shard()), EpochInfo())
        batches = self._open(self, run)
        info = self._shard.epoch_info
        if self._shard.has_length:
            return batches, info
        return split_items_ahead(((batch, None) for batch in batches), info)

    def _start_run(self) -> EpochRun:
        generator = self.synchronized_generator
        try:
            run = self._progress.start(self.skip_batches, self._skips_all(), self._step_size, self._limit)
            self._set_inner_epoch(run.begin.epoch)
            if self._shard is not None:
                self._shard.set_start(run.begin.consumed, run.begin.order)
            if generator is not None and run.begin.generator is not None:
                generator.set_state(run.begin.generator)
        except Exception:
            self._synchronize()  # a collective: the other ranks wait there
            raise
        self._synchronize()
        run.generator = None if generator is None else generator.get_state()
        return run

    def _skips_all(self) -> bool:
        # Only if something is skipped, since a length may be slow to compute.
        count = self._num_batches_if_known() if self.skip_batches else None
        return count is not None and self.skip_batches >= count

    def _num_batches_if_known(self) -> int | None:
        try:
            return self._num_batches()
        except TypeError:  # a stream or sampler without a length
            return None

    def _synchronize(self) -> None:
        """Synchronize random generators with process 0."""
        generator = self.synchronized_generator
        types = [kind for kind in self.rng_types or () if kind != RNGType.GENERATOR or generator is not None]
        if types:
            synchronize_rng_states(types, generator)

    @property
    def _counts_items(self) -> bool:
        """Whether steps are counted in unbatched items of the dataset."""
        return self._unbatched and self._shard is not None

    def _remainder_if_known(self) -> int:
        real, total = None if self._shard is None else self._shard.num_real_samples, self.total_batch_size
        return -1 if self._drop_last or real is None or total is None else real % total

    def _update_step(self, batch: Any, step_rows: StepRows | None, last: bool) -> None:
        if step_rows is not None and self._counts_items:  # the sizes of the other ranks' items are unknown
            rows = count_rows(batch)
            step_rows = StepRows(*(tuple(rows * count for count in counts) for counts in step_rows))
        self.real_samples, self.batch_rows = step_rows or (None, None)
        self.end_of_dataloader = last
        if last and self.remainder == -1:
            self.remainder = self._counted_remainder(batch) if step_rows is None else sum(step_rows.real)

    def _counted_remainder(self, batch: Any) -> int:
        """Return the remainder from the size of the last batch: on one process, for any batch sampler."""
        size = self.total_batch_size
        if self._shard is None or self._drop_last or size is None or size != self.batch_size:
            return -1
        return count_rows(batch) % size


def split_items(items: Generator[Item, None, None]) -> tuple[Iterator[Any], EpochInfo]:
    """Split items into the batches, and the rest, which is stored in the returned info."""
    info = EpochInfo()

    def batches() -> Iterator[Any]:
        with closing(items):
            for number, (batch, step_rows, last) in enumerate(items, 1):
                info.current_rows = step_rows
                if last:
                    info.num_batches, info.last_rows = number, step_rows
                yield batch

    return batches(), info


def split_items_ahead(
    batches: Iterator[tuple[Any, StepRows | None]], info: EpochInfo
) -> tuple[Iterator[Any], EpochInfo]:
    """Like `split_items` for (batch, step_rows), reading one ahead to detect the last one.

    Args:
        batches: The batches that are read.
        info: Receives sizes and number. It may already have the padding of the last batch.
    """

    def one_behind() -> Iterator[Any]:  # one generator for both tasks: each one costs time for every batch
        number = 1
        current = next(batches, None)
        for upcoming in batches:
            assert current is not None
            number += 1
            info.current_rows = current[1]
            yield current[0]
            current = upcoming
        if current is not None:
            info.num_batches = number
            info.last_rows = info.last_rows or current[1]
            yield current[0]

    return one_behind(), info


def with_last_flag(batches: Iterator[tuple[Any, StepRows | None]]) -> Generator[Item, None, None]:
    """Add to each batch whether it is the last one, by reading one ahead."""
    current = next(batches, None)
    if current is None:
        return
    for upcoming in batches:
        yield (*current, False)
        current = upcoming
    yield (*current, True)
