"""Starts torch's iteration over a loader, and tracks the positions of what its workers read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel_data.order.global_order import default_device_of
from accel_data.order.layout import StepRows
from accel_data.resume.cursor import EpochRun
from accel_data.resume.stream_position import BlockPosition
from accel_data.stream.first_sample import FirstSample, RankQueryWarning, SampleComparison
from accel_state.process.gloo_threads import wait_for_gloo_threads


def track_positions(
    blocks: Iterator[Any],
    run: EpochRun,
    num_skipped: int,
    comparison: SampleComparison | RankQueryWarning | None,
) -> Iterator[tuple[Any, StepRows | None]]:
    """Yield what workers have read, and record their positions.

    Args:
        blocks: (step_rows, batch, position) of each block.
        run: The run over the loader.
        num_skipped: Number of blocks to skip here if workers split the stream and cannot skip themselves.
        comparison: Checks the first sample.

    Yields:
        (batch, step_rows)
    """
    history = run.history
    assert history is not None
    for step_rows, batch, position in blocks:
        if isinstance(position, FirstSample):  # one per worker; only the first is used
            if comparison is not None and not comparison.is_done:
                comparison.compare(position)
        elif num_skipped and isinstance(position, BlockPosition):
            num_skipped -= 1
            history.skip(position)
        else:
            history.add(position, run.steps)
            yield batch, step_rows and StepRows(*map(tuple, step_rows))  # pinning memory turned it into lists


def start_iteration(
    start: Callable[[], Iterator[Any]], run: EpochRun, generator: torch.Generator | None, forks: bool
) -> Iterator[Any]:
    """Start torch's iteration, which draws a seed for the workers, by default from the global generator.

    An epoch draws it once: resuming an epoch leaves the generator unchanged, so that the numbers drawn after
    it are those of the uninterrupted run.

    Args:
        start: Starts the iteration.
        run: The run over the loader.
        generator: The generator of the seed; None for the global generator of the CPU.
        forks: Whether worker processes are started.
    """
    if forks:
        # A gloo thread that ends a collective briefly locks Python's list of threads. A worker forked in this
        # moment deadlocks: Python 3.11 takes the lock in the child (_PyEval_ReInitThreads) before it
        # re-creates it (_PyRuntimeState_ReInitThreads).
        wait_for_gloo_threads()
    with default_device_of(generator):
        if not run.resumed:
            return start()
        # The global CPU generator, from which torch draws the base seed if the loader has none.
        state = torch.get_rng_state()
        try:
            return start()
        finally:
            torch.set_rng_state(state)
