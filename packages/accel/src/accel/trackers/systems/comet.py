"""Comet."""

from __future__ import annotations

from typing import Any

from accel.trackers.base import on_main_process
from accel.trackers.run import RunTracker
from accel.trackers.values import named_images, numbers, plain
from accel_state.imports.packages import require


class CometMLTracker(RunTracker):
    """Logs to an experiment of Comet; offline with `online=False` or COMET_START_ONLINE=0.

    Args:
        run_name: The project's name.
        **kwargs: Further arguments of `comet_ml.start`, such as `workspace` and `experiment_config`.
    """

    name = "comet_ml"

    @property
    def writer(self) -> Any:
        """The experiment, as `comet_ml.start` returns it."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begin the experiment."""
        comet_ml = require("comet_ml", extra="comet_ml")
        self.run = comet_ml.start(**{"project_name": self.run_name, **self._kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store `values` as parameters; Comet names nested ones `outer|inner`."""
        self.run.log_parameters(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, nested ones as `outer/inner`, and the rest as text of the experiment.

        `kwargs` go to the experiment's `log_metrics`.
        """
        metrics, rest = numbers(values)
        if step is not None:
            self.run.set_step(step)
        self.run.log_metrics(metrics, step=step, **kwargs)
        for key, value in rest.items():
            self.run.log_other(key, value if isinstance(value, str) else str(value))

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` go to the experiment's `log_image`."""
        # Otherwise Comet stretches each image from its own darkest to its brightest value.
        options = {"image_minmax": (0, 255), **kwargs}
        for name, image in named_images(values):
            self.run.log_image(image, name=name, step=step, **options)

    @on_main_process
    def _log_rows(
        self, table_name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        """Log a table as the file `table_name.csv`, or `table_name_STEP.csv`; `kwargs` go to `log_table`."""
        name = table_name if step is None else f"{table_name}_{step}"
        if step is not None:
            self.run.set_step(step)  # log_table takes none
        self.run.log_table(f"{name}.csv", tabular_data=rows, headers=columns, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the experiment."""
        self.run.end()
