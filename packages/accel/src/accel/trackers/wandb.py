"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.values import images, plain, table_rows, unchanged
from accel_state.imports.packages import require

__all__ = ["WandBTracker"]


class WandBTracker(GeneralTracker):
    """Logs to a run of Weights & Biases; offline with `mode="offline"` or WANDB_MODE=offline.

    Args:
        run_name: The project's name.
        **kwargs: Further arguments of `wandb.init`, such as `name`, `entity`, `tags` and `dir`.
    """

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.run: Any = None
        self._kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The run, as `wandb.init` returns it."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        wandb = require("wandb", extra="wandb")
        # A project among the arguments comes before the run's name.
        self.run = wandb.init(**{"project": self.run_name, **self._kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store `values`, nested as they are, in the run's `config`."""
        # A run that is resumed has values already, which wandb would not let change.
        self.run.config.update(plain(values), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log whatever `wandb.Run.log` takes, its images, tables and histograms too; `kwargs` go there."""
        self.run.log(plain(values, unchanged), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` go to `wandb.Run.log`."""
        wandb = require("wandb", extra="wandb")
        for key, value in values.items():
            self.run.log({key: [wandb.Image(image) for image in images(value)]}, step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a `wandb.Table`; `kwargs` go to `wandb.Run.log`."""
        wandb = require("wandb", extra="wandb")
        if dataframe is None:
            columns, data = table_rows(columns, data, None)
        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()
