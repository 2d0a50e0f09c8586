"""Writing the files of statistics that the report reads: `statistics.jsonl` and `summary.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_state.logging.warning import warn


class RunFiles:
    """Writes the statistics of a run; a file that cannot be written does not stop training.

    Args:
        folder: Where files go; None for none.
        distinct_fraction: The fraction of the samples of all ranks that are distinct: ranks of one
            tensor-parallel group read the same.
    """

    def __init__(self, folder: Path | None, distinct_fraction: float) -> None:
        self.folder, self._distinct_fraction = folder, distinct_fraction
        self._started = time.time()  # in seconds since the epoch

    def add_gather(
        self,
        ranks: Sequence[Mapping[str, Any]],
        last_step: int,
        without_waits: Collection[str],
        slow: Sequence[dict[str, Any]],
    ) -> None:
        """Add a line to `statistics.jsonl`; none if nothing that is timed has run.

        Args:
            ranks: By rank the steps, samples and seconds of each part since the last gather.
            last_step: The step of the gather.
            without_waits: The parts that a rank works on by itself.
            slow: The slow processes, with "rank", "part" and "ratio".
        """
        longest, steps = max(sum(rank["seconds"].values()) for rank in ranks), ranks[0]["steps"]
        if not longest:
            return
        busy_ms = sorted(
            1e3 * sum(rank["seconds"][section] for section in without_waits) / steps for rank in ranks
        )
        numbers = {
            "samples_per_second": self._samples(ranks) / longest,
            "step_ms": 1e3 * longest / steps,
            "own_ms/fastest": busy_ms[0],
            "own_ms/median": busy_ms[len(busy_ms) // 2],
            "own_ms/slowest": busy_ms[-1],
        }
        values = {f"statistics/{name}": round(value, 4) for name, value in numbers.items()}
        line = {"time": round(time.time(), 3), "step": last_step, "values": values, "slow": slow}
        self._write("statistics.jsonl", json.dumps(line) + "\n", mode="a")

    def make_summary(self, ranks: Sequence[Mapping[str, Any]], processes: int, every: int) -> dict[str, Any]:
        """Return the summary of a run, as `summary.json` has it.

        Args:
            ranks: The reports of the ranks: "steps", "samples", "seconds" by part, and what
                `accel.observe.rank_reports.describe_rank` says.
            processes: Number of processes of the run.
            every: Steps between two gathers.
        """
        longest = max(sum(rank["seconds"].values()) for rank in ranks)
        samples = round(self._samples(ranks))
        rounded = [{name: round(value, 6) for name, value in rank["seconds"].items()} for rank in ranks]
        return {
            "version": 1,
            "started": round(self._started, 3),
            "ended": round(time.time(), 3),
            "processes": processes,
            "steps": max(rank["steps"] for rank in ranks),
            "samples": samples,
            "seconds": round(longest, 6),
            "samples_per_second": round(samples / longest, 3) if longest else 0.0,
            "every": every,
            "ranks": [{**rank, "seconds": seconds} for rank, seconds in zip(ranks, rounded, strict=True)],
            "missing": sorted(set(range(processes)) - {rank["rank"] for rank in ranks}),
            "slow": [],
        }

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        self._write("summary.json", json.dumps(summary, indent=1) + "\n", mode="w")

    def _samples(self, ranks: Sequence[Mapping[str, Any]]) -> float:
        samples: int = sum(rank["samples"] for rank in ranks)
        return self._distinct_fraction * samples

    def _write(self, name: str, text: str, mode: str) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / name).open(mode) as file:
                file.write(text)
        except OSError as error:
            warn(
                f"Statistics cannot write {self.folder / name}: {type(error).__name__}: {error}. Training "
                "goes on; no file of statistics is written from here on.",
                about="process",
            )
            self.folder = None
