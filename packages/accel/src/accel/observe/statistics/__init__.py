"""Where the time of a run goes: per process, per part of a step, and which process is slow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.observe.base import ObserverKwargs
from accel_state.env.fields import from_env, read_environment
from accel_state.verify import output_path

if TYPE_CHECKING:
    from accel.training.run import Run


@dataclass
class StatisticsKwargs(ObserverKwargs):
    """Turns statistics on: pass it in the Accelerator's `kwargs_handlers`, on every process.

    Times are those of the host: an accelerator computes while the host continues, so that its time is found
    where the host waits for it, unless `synchronize` is set.

    Attributes:
        every: Optimizer steps between two gathers, in which slow processes are found; 0 for none before the
            end. Default: ACCELERATE_STATISTICS, then 100.
        slow: A process is called slow when it needs more than so many times the median of all processes for
            its own part of a step, without its waits for others.
        summary: Whether `end_training` prints the summary of the run as a table.
        folder: Where the main process writes `summary.json` and, at each gather, a line of
            `statistics.jsonl`; default: the Accelerator's logging folder. Without either no file is written.
        synchronize: Wait for the accelerator wherever one part ends and the next one begins. Times are exact
            then, and steps take longer.

    Raises:
        ValueError: If `every` is negative or `slow` is not above 1.
    """

    every: int = from_env("ACCELERATE_STATISTICS")
    slow: float = 1.2
    summary: bool = True
    folder: str | None = None
    synchronize: bool = False

    def __post_init__(self) -> None:
        read_environment(self)
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 0:
            raise ValueError(
                f"StatisticsKwargs: every={self.every!r}; it takes the number of optimizer steps between two "
                "gathers, an integer of at least 1, or 0 for none before the end."
            )
        if not (isinstance(self.slow, int | float) and math.isfinite(self.slow) and self.slow > 1):
            raise ValueError(
                f"StatisticsKwargs: slow={self.slow!r}; it takes a number above 1: 1.2 names processes that "
                "need 20 % more time than the median."
            )

    def start(self, run: Run) -> Any:
        """Make the observer of a run that has prepared nothing yet."""
        from accel.observe.statistics.observer import Statistics

        folder = output_path(self.folder or run.project_configuration.logging_dir)
        return Statistics(run, self, None if folder is None else Path(folder))
