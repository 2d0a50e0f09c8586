"""What the watchdog adds to a DDP step of some milliseconds."""

from __future__ import annotations

from statistics import median

from .prepared_loop import prepare_loop
from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios
from .workers import run_workers

__all__ = ["measure_watchdog", "watchdog_row"]

LIMIT = 1.01
STEPS = 100  # of a turn, which takes about half a second
TIMEOUT_S = 0.2  # which makes it look ten times as often as with the default, ten times in a turn


def watchdog_row(*, quick: bool = False) -> Row:
    """Measure a step of two processes that are watched, as a multiple of the same step without."""
    samples: Samples = run_workers("watchdog:measure_watchdog", 2, rounds=4 if quick else 60)
    compared = ratios(samples)
    return Row(
        what="watchdog on, DDP step on 2 processes: time / off",
        value=compared["accel"].median,
        limit=LIMIT,
        noise=compared[CONTROL],
        base=f"{1e3 * median(samples[BASELINE]):.2f} ms",
    )


def measure_watchdog(rank: int, size: int, rounds: int) -> Samples:
    """Time the same steps with and without; runs in each worker."""
    from accel_ops.debug.watchdog import Watchdog

    loop = prepare_loop(STEPS)

    def watched() -> float:
        dog = Watchdog(loop.accelerator.process, TIMEOUT_S)
        try:
            return loop.measure()
        finally:
            loop.accelerator.wait_for_everyone()  # else one process would wait for the other to see it leave
            dog.stop()

    samples = interleave(
        {BASELINE: loop.measure, CONTROL: loop.measure, "accel": watched}, rounds=rounds, warmup=1
    )
    loop.accelerator.end_training()
    return samples
