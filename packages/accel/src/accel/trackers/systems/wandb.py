"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from accel.trackers.base import on_main_process
from accel.trackers.run import RunTracker
from accel.trackers.values import images, plain, table_rows, unchanged


class WandBTracker(RunTracker):
    """Logs to a run of Weights & Biases; offline with `mode="offline"` or WANDB_MODE=offline.

    Args:
        run_name: The project's name.
        **kwargs: Further arguments of `wandb.init`, such as `name`, `entity`, `tags` and `dir`.
    """

    name = "wandb"

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
        for key, value in values.items():
            self.run.log({key: [self._library.Image(image) for image in images(value)]}, step=step, **kwargs)

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
        if dataframe is None:
            columns, data = table_rows(columns, data, None)
        table = self._library.Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)
