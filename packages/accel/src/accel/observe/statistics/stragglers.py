"""Find the processes that the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from accel.observe.statistics.clock import SECTIONS

RANK_SECTIONS = tuple(section for section in SECTIONS if section not in ("collectives", "checkpoint"))
"""The sections in which a process does not wait for other ranks."""


@dataclass(frozen=True)
class Straggler:
    """A slow process.

    Attributes:
        rank: The process.
        section: The section of the step in which it loses most time.
        ratio: Its time of a step without waits, over the median of all processes.
        busy_s: Its time of a step without waits, in seconds.
        median_s: The median of these.
        section_s: Its time in that section per step, in seconds.
        median_section_s: The median of these.
    """

    rank: int
    section: str
    ratio: float
    busy_s: float
    median_s: float
    section_s: float
    median_section_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return what files say about it."""
        return {"rank": self.rank, "part": self.section, "ratio": round(self.ratio, 3)}

    def describe(self, first_step: int, last_step: int) -> str:
        """Return one sentence about steps `first_step` to `last_step`."""
        name = "the rest of the script" if self.section == "other" else self.section
        return (
            f"Process {self.rank} is slow: in steps {first_step} to {last_step} it needs "
            f"{1e3 * self.busy_s:.1f} ms per step without its waits, {self.ratio:.1f} times the median "
            f"({1e3 * self.median_s:.1f} ms). Most of it is {name}: {1e3 * self.section_s:.1f} ms there, and "
            f"{1e3 * self.median_section_s:.1f} ms on the median process."
        )


def find_stragglers(reports: Sequence[Mapping[str, Any]], slow: float, hides_waits: bool) -> list[Straggler]:
    """Return the processes that need more than `slow` times the median time of a step without waits.

    Under DDP all processes take the same time for a step, as they wait for the slowest: what differs is the
    time outside of the waits.

    Args:
        reports: Of each process the "seconds" of each section, and the number of "steps" that these are for.
        slow: See above.
        hides_waits: Whether processes may wait for each other within forward and backward, as sharded models
            do. These are long on the fast processes then, so data is also compared separately.
    """
    # One process has none to be compared with, and one without steps has no time per step.
    if len(reports) < 2 or min(report["steps"] for report in reports) < 1:
        return []
    ranks = [
        {section: each["seconds"][section] / each["steps"] for section in RANK_SECTIONS} for each in reports
    ]
    totals = [sum(times.values()) for times in ranks]
    # The lower one of two.
    medians = {section: median_low([times[section] for times in ranks]) for section in RANK_SECTIONS}
    median_s, found = median_low(totals), []
    for rank, times in enumerate(ranks):
        excess = {section: times[section] - medians[section] for section in RANK_SECTIONS}
        section, lost = max(RANK_SECTIONS, key=excess.__getitem__), totals[rank] - median_s
        if hides_waits and excess["data"] > lost:
            section, lost = "data", excess["data"]
        if lost > (slow - 1) * median_s:
            ratio = 1 + lost / median_s if median_s else float("inf")
            found.append(
                Straggler(rank, section, ratio, median_s + lost, median_s, times[section], medians[section])
            )
    return found
