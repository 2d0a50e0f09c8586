"""The guard's findings in a step, and their description."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The findings of one process.

    Attributes:
        rank: Its rank.
        losses: The losses of the window, one per backward pass.
        is_spike: Whether their mean is a spike.
        parameters: Gradients that are not finite: the place in backward and the name of each parameter.
        num_gradients: How many parameters have a gradient.
    """

    rank: int
    losses: tuple[float, ...]
    is_spike: bool
    parameters: tuple[tuple[int, str], ...]
    num_gradients: int

    @property
    def bad_losses(self) -> list[int]:
        """The backward passes whose loss is not finite, from 0."""
        return [index for index, loss in enumerate(self.losses) if not math.isfinite(loss)]

    @property
    def is_bad(self) -> bool:
        """Whether this process's own losses are what is wrong."""
        return bool(self.bad_losses) or self.is_spike


class Spikes:
    """Which loss is a spike: one above a multiple of the median of the last steps.

    Args:
        factor: The multiple.
        window: Steps of the median.
    """

    def __init__(self, factor: float, window: int) -> None:
        self._factor, self._window = factor, window
        self._last: list[float] = []
        self.median = math.nan

    def find(self, means: Sequence[float]) -> list[bool]:
        """Say of each process's loss whether it is a spike, and count the step.

        A spike counts in later medians, as a loss may rise for good; one that is not finite does not.

        Args:
            means: The mean loss of each process; NaN for one without.
        """
        found = [False] * len(means)
        self.median = sorted(self._last)[len(self._last) // 2] if len(self._last) >= _FEWEST else math.nan
        if self.median > 0:  # losses around 0 or below have no multiple that means anything; NaN neither
            found = [mean > self._factor * self.median for mean in means]
        finite = [mean for mean in means if math.isfinite(mean)]
        if finite:
            self._last = [*self._last, sum(finite) / len(finite)][-self._window :]
        return found


_FEWEST = 10  # losses that make a median


def named_ranks(findings: Sequence[Finding]) -> str:
    """Name processes by their ranks, the first few of many."""
    ranks = [str(finding.rank) for finding in findings]
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:8])}{more}"


def describe(step: int, findings: Sequence[Finding], spikes: Spikes | None, scale: float | None) -> str:
    """Say what is wrong with a step.

    Args:
        step: Its number, from 1.
        findings: Those of the processes.
        spikes: What found spikes, if they are looked for.
        scale: The loss scale of fp16, where gradients are not finite in spite of it.
    """
    problems = []
    broken = [finding for finding in findings if finding.bad_losses]
    if broken:
        first = broken[0]
        index = first.bad_losses[0]
        count = len(first.losses)
        place = f" of backward pass {index + 1} of {count}" if count > 1 else ""
        problems.append(f"the loss{place} is {first.losses[index]} on {named_ranks(broken)}")
    high = [finding for finding in findings if finding.is_spike and not finding.bad_losses]
    if high and spikes is not None:
        mean = sum(high[0].losses) / len(high[0].losses)
        problems.append(
            f"the loss is {mean:.6g} on {named_ranks(high)}, with a median of {spikes.median:.6g} before"
        )
    places = {name: place for finding in findings for place, name in finding.parameters}
    if places:
        total = max(finding.num_gradients for finding in findings)
        at = "" if scale is None else f" at a loss scale of {scale:g}"
        # What backward reaches later is computed from it, and broken by it.
        earliest = min(places, key=lambda name: places[name])
        problems.append(
            f"the gradients of {len(places)} of {max(total, len(places))} parameters are not finite{at}, "
            f"in the order of backward first that of {earliest}"
        )
    return f"Step {step}: {'; '.join(problems)}."
