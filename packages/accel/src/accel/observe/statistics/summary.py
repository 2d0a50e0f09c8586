"""The summary of a run: what every process adds to it, its JSON, and its table."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accel.observe.statistics.clock import PARTS
from accel_ops.debug.store import default_store
from accel_state.devices.table import device_spec

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo

ANSWER_S = 30.0
"""How long the main process waits at the end for the numbers of the others, in seconds."""


def peak_memory(process: ProcessInfo) -> dict[str, int]:
    """Return the most memory that this process had, in bytes: of the host, and of tensors on its device."""
    peaks = {"host": 0, "device": device_spec(process.device).max_memory_allocated()}
    try:
        import resource
    except ImportError:  # Windows
        return peaks
    # macOS counts bytes, the others KiB.
    unit = 1 if platform.system() == "Darwin" else 1024
    peaks["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peaks


def next_number(process: ProcessInfo) -> int:
    """Return the number of an exchange; the same on all processes that have called this as often."""
    store = default_store() if process.world_size > 1 else None
    # Under a key of its own, so that no process waits for another one here.
    return 0 if store is None else int(store.add(f"accel/statistics/starts/{process.rank}", 1))


def exchange(process: ProcessInfo, number: int, own: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Bring the numbers of all processes to the main process.

    Through the store of the process group: no process waits for one that has ended, as it would in a
    collective.

    Args:
        process: The facts of this process.
        number: What `next_number` returned.
        own: What this process adds: values that JSON has.

    Returns:
        What the processes that answered added, by rank; None on the other processes.
    """
    store = default_store() if process.world_size > 1 else None
    if store is None:
        return [own] if process.is_main else None
    keys = [f"accel/statistics/{number}/{rank}" for rank in range(process.world_size)]
    try:
        store.set(keys[process.rank], json.dumps(own))
    except RuntimeError:  # the process that hosts the store has ended
        return [own] if process.is_main else None
    if not process.is_main:
        return None
    try:
        store.wait(keys, timedelta(seconds=ANSWER_S))
    except RuntimeError:  # some have not come: the others count
        keys = [key for key in keys if store.check([key])]
    return [json.loads(store.get(key)) for key in keys]


def summarize(
    ranks: Sequence[Mapping[str, Any]], processes: int, share: float, started: float, every: int
) -> dict[str, Any]:
    """Return the summary, as `summary.json` has it.

    Args:
        ranks: What the processes added: "rank", "device", "host", "steps", "samples", "seconds" by part and
            "peak_memory".
        processes: Number of processes of the run.
        share: The part of the samples of all processes that are different ones.
        started: When the run began, in seconds since the epoch.
        every: Steps between two gathers.
    """
    whole = max(sum(own["seconds"].values()) for own in ranks)
    # Processes of one tensor-parallel group read the same samples.
    samples = round(share * sum(own["samples"] for own in ranks))
    return {
        "version": 1,
        "started": round(started, 3),
        "ended": round(time.time(), 3),
        "processes": processes,
        "steps": max(own["steps"] for own in ranks),
        "samples": samples,
        "seconds": round(whole, 6),
        "samples_per_second": round(samples / whole, 3) if whole else 0.0,
        "every": every,
        "ranks": [dict(own) for own in ranks],
        "missing": sorted(set(range(processes)) - {own["rank"] for own in ranks}),
        "slow": [],
    }


def render(summary: Mapping[str, Any]) -> str:
    """Return the summary as lines of text."""
    count = summary["processes"]
    head = (
        f"{summary['steps']:,} steps and {summary['samples']:,} samples in {summary['seconds']:.2f} s on "
        f"{count} process{'es' * (count > 1)}: {summary['samples_per_second']:,.1f} samples per second"
    )
    has_device = any(own["peak_memory"]["device"] for own in summary["ranks"])
    names = ["process", "seconds", *PARTS, "memory", *(["device memory"] if has_device else [])]
    lines = [names, *(_cells(own, has_device) for own in summary["ranks"])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    notes = [f"process {rank} did not answer" for rank in summary["missing"]]
    notes += [_describe_slow(slow) for slow in summary["slow"]]
    return "\n".join([head, *table, *notes])


def _describe_slow(slow: Mapping[str, Any]) -> str:
    """Return one line about a slow process of the summary."""
    part = "the rest of the script" if slow["part"] == "other" else slow["part"]
    much = f"up to {slow['ratio']:.1f} times the median"
    return f"process {slow['rank']} is slow: {part}, {much} (steps {slow['steps'][0]} to {slow['steps'][1]})"


def _cells(own: Mapping[str, Any], has_device: bool) -> list[str]:
    whole = sum(own["seconds"].values())
    shares = [f"{100 * own['seconds'][part] / whole:.0f} %" if whole else "-" for part in PARTS]
    peaks = own["peak_memory"]
    memory = [f"{peaks[kind] / 2**20:,.0f} MiB" for kind in ("host", *(["device"] * has_device))]
    return [str(own["rank"]), f"{whole:.2f}", *shares, *memory]
