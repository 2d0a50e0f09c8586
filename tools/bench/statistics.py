"""What statistics add to a DDP step of some milliseconds."""

from __future__ import annotations

from statistics import median

from .ddp_step import STEPS, ddp_step
from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios
from .workers import run_workers

__all__ = ["measure_statistics", "statistics_row"]

LIMIT = 1.01


def statistics_row(*, quick: bool = False) -> Row:
    """Measure a step of two processes with statistics, as a multiple of the same step without."""
    samples: Samples = run_workers("statistics:measure_statistics", 2, rounds=4 if quick else 60)
    compared = ratios(samples)
    return Row(
        what="statistics on, DDP step on 2 processes: time / off",
        value=compared["accel"].median,
        limit=LIMIT,
        noise=compared[CONTROL],
        base=f"{1e3 * median(samples[BASELINE]):.2f} ms",
    )


def measure_statistics(rank: int, size: int, rounds: int) -> Samples:
    """Time the same steps with and without; runs in each worker."""
    from accel.observe.statistics import StatisticsKwargs

    step = ddp_step()
    settings = StatisticsKwargs(every=STEPS, slow=1e9, summary=False)  # one gather in each turn

    def observed() -> float:
        observer = settings.start(step.accelerator.run)
        observer.model_prepared(step.model)
        observer.optimizer_prepared(step.optimizer)
        observer.loader_prepared(step.loader)
        try:
            return step.measure()
        finally:
            observer.stop()

    samples = interleave(
        {BASELINE: step.measure, CONTROL: step.measure, "accel": observed}, rounds=rounds, warmup=1
    )
    step.accelerator.end_training()
    return samples
