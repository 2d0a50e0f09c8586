"""The table of `ProfileKwargs(summary=...)`: where the processes of a run spent their time, by operator."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from accel.observe.rank_reports import RankReports

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo

_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)

WAIT_S = 60.0
"""How long the main process waits for the others to leave their blocks, in seconds."""

Totals = Mapping[str, Sequence[float]]
"""Of each operator: calls, microseconds of the CPU, microseconds of the device, bytes."""


class OperatorTotals:
    """Sums over the recordings of one process.

    Attributes:
        values: The sums by operator.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, averages: Iterable[Any]) -> None:
        """Add a recording.

        Args:
            averages: What `key_averages` of torch's profiler returns.
        """
        for event in averages:
            # A kernel's time is in that of its operator too; the others are whole steps, and freed memory.
            if event.device_type.name != "CPU" or event.key.startswith(("ProfilerStep", "[memory]")):
                continue
            memory = event.self_cpu_memory_usage + event.self_device_memory_usage
            new = (event.count, event.self_cpu_time_total, event.self_device_time_total, memory)
            # With stacks there are methods of objects, whose addresses differ between processes.
            name = _ADDRESS.sub("", event.key)
            old = self.values.get(name, (0, 0, 0, 0))
            self.values[name] = [before + more for before, more in zip(old, new, strict=True)]


def print_summary(totals: OperatorTotals, rows: int, process: ProcessInfo, failed: bool) -> None:
    """Print the table on the main process; the others send it their totals.

    Args:
        totals: Of this process.
        rows: How many operators to show.
        process: This process.
        failed: Whether its block raised: the main process then prints nothing.
    """
    reports = RankReports(process, "profile")
    reports.send("totals", totals.values)
    if process.is_main and not failed:
        totals_by_rank = reports.receive("totals", WAIT_S, partial=True) or {}
        print(table(totals_by_rank, rows, process.world_size))


def table(totals_by_rank: Mapping[int, Totals], rows: int, world_size: int) -> str:
    """Return the summary as text: the operators with the most self time, and the sum of all.

    Numbers are means over the processes; of several, the one with the most time is shown next to the mean.
    The device's time counts where any was recorded, otherwise the CPU's.

    Args:
        totals_by_rank: The totals by rank.
        rows: How many operators to show.
        world_size: Number of processes of the run.

    Returns:
        The text, without a newline at the end.
    """
    per_rank = {
        name: {rank: totals.get(name, (0, 0, 0, 0)) for rank, totals in totals_by_rank.items()}
        for name in {name for totals in totals_by_rank.values() for name in totals}
    }
    means = {
        name: [fmean(column) for column in zip(*of_ranks.values(), strict=True)]
        for name, of_ranks in per_rank.items()
    }
    time, kind = (2, "device ms") if any(mean[2] for mean in means.values()) else (1, "CPU ms")
    total_us = sum(mean[time] for mean in means.values())
    shown = sorted(means, key=lambda name: (-means[name][time], name))[:rows]
    columns = [
        ["operator", *shown, f"all {len(means)} operators"],
        ["calls", *(f"{means[name][0]:.0f}" for name in shown), ""],
        [kind, *(f"{means[name][time] / 1e3:.2f}" for name in shown), f"{total_us / 1e3:.2f}"],
        ["share", *(f"{means[name][time] / (total_us or 1):.0%}" for name in shown), ""],
    ]
    if len(totals_by_rank) > 1:
        columns.append(["most", *(_most(per_rank[name], time) for name in shown), ""])
    if any(mean[3] for mean in means.values()):
        columns.append(["MB", *(f"{means[name][3] / 1e6:.2f}" for name in shown), ""])
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for name, *rest in zip(*columns, strict=True):
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join([_title(totals_by_rank, world_size), *lines])


def _most(of_ranks: Mapping[int, Sequence[float]], column: int) -> str:
    rank = max(of_ranks, key=lambda rank: of_ranks[rank][column])
    return f"{of_ranks[rank][column] / 1e3:.2f} (process {rank})"


def _title(totals_by_rank: Mapping[int, Totals], world_size: int) -> str:
    missing = [str(rank) for rank in range(world_size) if rank not in totals_by_rank]
    if missing:
        reported = len(totals_by_rank)
        return f"Profile of {reported} of {world_size} processes (nothing came from {', '.join(missing)}):"
    return f"Profile, means of {world_size} processes:" if world_size > 1 else "Profile:"
