"""Interleaved timing: contestants take turns in many short rounds, and are compared within each round.

A busy machine slows whatever runs at the moment. Contestants that take turns every few milliseconds are
slowed equally, so the ratio within a round is stable even if the times themselves are not. How stable is
measured too: every set of contestants has the baseline twice, and the ratio of those two is the noise.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median, quantiles

__all__ = [
    "BASELINE",
    "CONTROL",
    "Samples",
    "Spread",
    "differences",
    "interleave",
    "median_limits",
    "ratios",
    "spread",
    "timed",
]

BASELINE = "baseline"
CONTROL = "baseline again"

Samples = dict[str, list[float]]
"""Seconds, by contestant, one value for each round."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of what was measured in each round."""

    median: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """Return the three numbers under their names."""
        return asdict(self)


def spread(values: list[float]) -> Spread:
    """Summarise one value per round.

    Args:
        values: At least two numbers.

    Returns:
        Their median and their first and third quartile.
    """
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high)


def median_limits(values: list[float]) -> tuple[float, float]:
    """Return the limits between which the median lies with 95 % (bootstrap)."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(1000))
    return medians[25], medians[974]


def interleave(measures: Mapping[str, Callable[[], float]], *, rounds: int, warmup: int = 1) -> Samples:
    """Measure the contestants by turns.

    The order is drawn again in each round, so that none always follows the same neighbour, from generators
    with fixed seeds: ranks that measure collectives stay in step.

    Args:
        measures: For each contestant's name, what runs it for one turn and returns its seconds.
        rounds: How many turns each contestant has.
        warmup: Rounds that are run first and not counted.

    Returns:
        The seconds of each contestant, round by round.
    """
    names = list(measures)
    samples: Samples = {name: [] for name in names}
    gc.collect()
    gc.disable()  # a collection would be charged to the contestant that happens to run
    try:
        for number in range(-warmup, rounds):
            for name in random.Random(number).sample(names, len(names)):
                seconds = measures[name]()
                if number >= 0:
                    samples[name].append(seconds)
    finally:
        gc.enable()
    return samples


def timed(
    call: Callable[[], object], calls: int, wait: Callable[[], object] = lambda: None
) -> Callable[[], float]:
    """Return a measure of the wall time of one call, taken over several in a row.

    One more call goes first and is not counted: it finds the caches as the contestant before left them.

    Args:
        call: What is measured.
        calls: How often it is called in a row.
        wait: Waits for what a device still has to do, before the clock starts and before it stops.
    """

    def measure() -> float:
        call()
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return (time.perf_counter() - start) / calls

    return measure


def ratios(samples: Samples, over: str = BASELINE) -> dict[str, Spread]:
    """Return the time of each contestant as a multiple of that of `over` in the same round."""
    base = samples[over]
    return {
        name: spread([value / other for value, other in zip(values, base, strict=True)])
        for name, values in samples.items()
    }


def differences(samples: Samples, over: str = BASELINE) -> dict[str, Spread]:
    """Return what each contestant needs more than `over` in the same round, in seconds."""
    base = samples[over]
    return {
        name: spread([value - other for value, other in zip(values, base, strict=True)])
        for name, values in samples.items()
    }
