"""What statistics add to a step of some milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from .prepared_loop import WARMUP, prepare_loop
from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, median_limits, ratios
from .workers import run_workers

__all__ = ["measure_statistics", "statistics_rows"]

LIMIT = 1.01
ON, GATHERING = "accel", "accel, one gather in each turn"
STEPS = 10  # of a turn: the shorter it is, the more similar are its neighbours
WHAT = {
    1: "statistics on, step of 1 process: time / off",
    2: "statistics on, DDP step on 2 processes: time / off",
}


def statistics_rows(*, quick: bool = False) -> list[Row]:
    """Measure steps with statistics, as a multiple of the same steps without."""
    return [_row(size, rounds=4 if quick else 200) for size in WHAT]


def _row(size: int, rounds: int) -> Row:
    from accel_state import env

    samples: Samples = run_workers("statistics:measure_statistics", size, rounds=rounds)
    # One gather in ten turns, where each turn of the second kind has one.
    share = STEPS / env.VARIABLES["ACCELERATE_STATISTICS"].default
    values = [
        ((1 - share) * on + share * gathering) / off
        for on, gathering, off in zip(samples[ON], samples[GATHERING], samples[BASELINE], strict=True)
    ]
    low, high = median_limits(values)
    return Row(
        what=WHAT[size],
        value=median(values),
        limit=LIMIT,
        noise=ratios(samples)[CONTROL],
        base=f"{1e3 * median(samples[BASELINE]):.2f} ms; 95 %: {low:.3f} to {high:.3f}",
    )


def measure_statistics(rank: int, size: int, rounds: int) -> Samples:
    """Time the same steps with and without; runs in each worker."""
    from accel.observe.statistics import StatisticsKwargs
    from accel_state.step_events import subscribe

    loop = prepare_loop(STEPS)

    def observed(every: int) -> Callable[[], float]:
        settings = StatisticsKwargs(every=every, slow=1e9, summary=False)

        def measure() -> float:
            observer = settings.start(loop.accelerator.run)
            observer.model_prepared(loop.model)
            subscribe(loop.accelerator.gradient_state, observer)
            try:
                # Notes are added up at the next gather, wherever that is: each turn pays for its notes.
                return loop.measure(at_end=observer.clock.read)
            finally:
                observer.stop()

        return measure

    # The gather is in the turn's middle, so that the turn has the steps that take its result too.
    measures = {
        BASELINE: loop.measure,
        CONTROL: loop.measure,
        ON: observed(every=0),
        GATHERING: observed(every=STEPS // 2 + WARMUP),
    }
    samples = interleave(measures, rounds=rounds, warmup=1)
    loop.accelerator.end_training()
    return samples
