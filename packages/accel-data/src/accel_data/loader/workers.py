"""Starting torch's own iteration over a loader, and handing on what its workers have read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel_data.order.global_order import drawing_from
from accel_data.order.layout import StepRows
from accel_data.resume.cursor import Pass
from accel_data.resume.stream_position import Mark
from accel_data.stream.first_sample import FirstSample, RankNotice, SampleComparison
from accel_state.process.gloo_threads import wait_for_gloo_threads


def handed_on(
    blocks: Iterator[Any], started: Pass, over: int, comparison: SampleComparison | RankNotice | None
) -> Iterator[tuple[Any, StepRows | None]]:
    """Hand on what workers have read, and note where they were.

    Args:
        blocks: (fill, batch, mark) of each block.
        started: The pass.
        over: How many blocks to pass over if workers divide the stream, who cannot do so by themselves.
        comparison: Looks at the first sample.

    Yields:
        (batch, fill)
    """
    trail = started.trail
    assert trail is not None
    for fill, batch, mark in blocks:
        if isinstance(mark, FirstSample):  # from each worker; that of the first one counts
            if comparison is not None and not comparison.is_done:
                comparison.compare(mark)
        elif over and isinstance(mark, Mark):
            over -= 1
            trail.pass_over(mark)
        else:
            trail.add(mark, started.steps)
            yield batch, fill and StepRows(*map(tuple, fill))  # pinning memory made lists of it


def opened(
    start: Callable[[], Iterator[Any]], started: Pass, generator: torch.Generator | None, forks: bool
) -> Iterator[Any]:
    """Start torch's own iteration, which draws a seed for the workers, by default from the global generator.

    An epoch draws it once: a pass that goes on with an epoch leaves the generator as it was, so that the
    numbers drawn after it are those of the run that was not interrupted.

    Args:
        start: Starts the iteration.
        started: The pass.
        generator: Where the seed comes from; None for the global generator of the CPU.
        forks: Whether processes that read ahead are started.
    """
    if forks:
        # A thread of gloo that ends a collective locks Python's list of threads for a moment. A worker that
        # is forked in this moment waits for that lock for ever: Python 3.11 takes it in the child
        # (_PyEval_ReInitThreads) before it makes it anew (_PyRuntimeState_ReInitThreads).
        wait_for_gloo_threads()
    with drawing_from(generator):
        if not started.resumed:
            return start()
        # The CPU's global generator, from which torch draws the base seed where the loader has none.
        state = torch.get_rng_state()
        try:
            return start()
        finally:
            torch.set_rng_state(state)
