"""The records of a run of one process and a run of many, and distances between their values."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

Record = dict[str, Any]
"""The record of one process (see `accel.observe.verify.record`)."""
Sketches = dict[str, list[float]]
"""The norm and the projections of tensors, by name (see `accel.observe.verify.fingerprint`)."""


def record_file(folder: Path, rank: int) -> Path:
    """The file to which a process appends what it records: lines of JSON."""
    return folder / f"rank-{rank}.jsonl"


def read_record(folder: Path, rank: int) -> Record:
    """Read the record of a process."""
    record: Record = {"initial": {}, "steps": []}
    for line in record_file(folder, rank).read_text().splitlines():
        record |= json.loads(line)
        if "step" in record:
            record["steps"].append(record.pop("step"))
    return record


@dataclass(frozen=True)
class RecordedRuns:
    """A run of one process, and one of many.

    Args:
        one: What was recorded of one process.
        many: The same of each process of the other run, in the order of their ranks.
    """

    one: Record
    many: Sequence[Record]

    @property
    def shards(self) -> list[Record]:
        """One record of each shard of the data, in their order."""
        by_rank = {record["data_rank"]: record for record in reversed(self.many)}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def samples(self, place: int) -> list[list[int]]:
        """The samples of each shard of the data in a step."""
        return [record["steps"][place]["samples"] for record in self.shards]

    def loss(self, place: int) -> float:
        """The loss over all processes in a step."""
        return mean_loss([record["steps"][place] for record in self.shards])


def mean_loss(steps: Sequence[dict[str, Any]]) -> float:
    """The loss over processes: the sum over all weights where there are weights, else the mean of means."""
    losses = [pair for step in steps for pair in step["losses"]]
    if not losses:
        return math.nan
    if any(weight is not None for _, weight in losses):
        weights = sum(weight or 0.0 for _, weight in losses)
        return sum(value for value, _ in losses) / weights if weights else 0.0
    return fmean(sum(value for value, _ in step["losses"]) for step in steps)


def is_close(one: float, other: float, tolerance: float) -> bool:
    """Whether two numbers are the same up to a relative tolerance, or both are not a number."""
    both_nan = math.isnan(one) and math.isnan(other)
    # 1e-9, as no relative difference from 0 is small.
    return both_nan or math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-9)


def total_norm(sketches: Sketches) -> float:
    """The norm of all tensors together."""
    return math.sqrt(sum(sketch[0] ** 2 for sketch in sketches.values()))


def gradient_norm(step: dict[str, Any]) -> float:
    """The norm of all gradients of a step, before clipping."""
    norm: float | None = step["norm"]
    return total_norm(step["gradients"]) if norm is None else norm


def distance(one: Sketches, other: Sketches, name: str) -> float:
    """The estimated norm of the difference of two tensors; one that is not there counts as zeros."""
    first, second = one.get(name), other.get(name)
    if first is None or second is None:
        values = first or second
        return values[0] if values else 0.0
    if first == second:
        return 0.0
    apart = math.sqrt(fmean((a - b) ** 2 for a, b in zip(first[1:], second[1:], strict=True)))
    both_nan = math.isnan(first[0]) and math.isnan(second[0])
    return 0.0 if both_nan else apart
