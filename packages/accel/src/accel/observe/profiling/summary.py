"""The table of `ProfileKwargs(summary=...)`: where the processes of a run spent their time, by operator."""

from __future__ import annotations

import contextlib
import json
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo

_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)

WAIT_S = 60.0
"""How long the main process waits (seconds) for another one to leave its block."""

Totals = Mapping[str, Sequence[float]]
"""Of each operator: calls, microseconds of the CPU, microseconds of the device, bytes."""

# The default group, and how many blocks there were in it: the n-th of one process is the n-th of every other.
# The reference is weak, so that a destroyed group is freed.
_blocks: tuple[weakref.ref[Any], int] | None = None


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
    found: dict[int, Totals] = {process.rank: totals.values}
    # Not by a collective: where a process left its block by an exception, that would pair with another one.
    store = _store(process)
    if not process.is_main:
        if store is not None:
            with contextlib.suppress(RuntimeError):  # the main process has ended
                store.set(str(process.rank), json.dumps(totals.values))
    elif not failed:
        for rank in range(1, process.world_size) if store is not None else ():
            with contextlib.suppress(RuntimeError):  # a timeout; the table says who is not in it
                store.wait([str(rank)], timedelta(seconds=WAIT_S))
                found[rank] = json.loads(store.get(str(rank)))
        print(table(found, rows, process.world_size))


def _store(process: ProcessInfo) -> Any:
    global _blocks
    if process.world_size == 1:
        return None
    # Here, as only a summary of several processes needs it.
    from accel_ops.debug.store import default_store

    store = default_store()
    if store is None:
        return None
    group = dist.group.WORLD
    number = _blocks[1] + 1 if _blocks is not None and _blocks[0]() is group else 0
    _blocks = (weakref.ref(group), number)
    return dist.PrefixStore(f"accel/profile/{number}", store)  # type: ignore[attr-defined]


def table(found: Mapping[int, Totals], rows: int, world_size: int) -> str:
    """Return the summary as text: the operators with the most time of their own, and the sum of all.

    Numbers are means over the processes; of several, the one with the most time stands beside the mean. The
    device's time counts where any was recorded, otherwise the CPU's.

    Args:
        found: The totals by rank.
        rows: How many operators to show.
        world_size: Number of processes of the run.

    Returns:
        The text, without a newline at the end.
    """
    per_rank = {
        name: {rank: totals.get(name, (0, 0, 0, 0)) for rank, totals in found.items()}
        for name in {name for totals in found.values() for name in totals}
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
    if len(found) > 1:
        columns.append(["most", *(_most(per_rank[name], time) for name in shown), ""])
    if any(mean[3] for mean in means.values()):
        columns.append(["MB", *(f"{means[name][3] / 1e6:.2f}" for name in shown), ""])
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for name, *rest in zip(*columns, strict=True):
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join([_title(found, world_size), *lines])


def _most(of_ranks: Mapping[int, Sequence[float]], column: int) -> str:
    rank = max(of_ranks, key=lambda rank: of_ranks[rank][column])
    return f"{of_ranks[rank][column] / 1e3:.2f} (process {rank})"


def _title(found: Mapping[int, Totals], world_size: int) -> str:
    missing = [str(rank) for rank in range(world_size) if rank not in found]
    if missing:
        return f"Profile of {len(found)} of {world_size} processes (nothing came from {', '.join(missing)}):"
    return f"Profile, means of {world_size} processes:" if world_size > 1 else "Profile:"
