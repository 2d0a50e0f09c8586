"""ClearML."""

from __future__ import annotations

import math
from typing import Any

from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.values import named_images, numbers, plain, warn_left_out
from accel_state import env
from accel_state.imports.packages import require


class ClearMLTracker(GeneralTracker):
    """Logs to a task of ClearML; offline with CLEARML_OFFLINE_MODE=1.

    A task that the script has started already is used, and left open at the end.

    Args:
        run_name: The name of the project and of the task; CLEARML_PROJECT and CLEARML_TASK come before it.
        **kwargs: Further arguments of `clearml.Task.init`.
    """

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.task: Any = None
        self._kwargs = kwargs
        self._created_task = False

    @property
    def tracker(self) -> Any:
        """The task."""
        return self.task

    @on_main_process
    def start(self) -> None:
        """Begin the task, or take the one that runs."""
        clearml = require("clearml", extra="clearml")
        # A script may have begun a task, and then ends it itself.
        self.task = clearml.Task.current_task()
        self._created_task = self.task is None
        if self._created_task:
            names = {
                "project_name": env.raw("CLEARML_PROJECT") or self.run_name,
                "task_name": env.raw("CLEARML_TASK") or self.run_name,
            }
            self.task = clearml.Task.init(**{**names, **self._kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store `values`, nested as they are, as the task's configuration."""
        self.task.connect_configuration(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, nested ones as `outer/inner`: as scalars at `step`, or without one as single values.

        A name that begins with `eval_`, `test_` or `train_` is a scalar without that prefix, in the series of
        that name; other names are in the series "train". ClearML would store NaN and infinities as 0: they
        are written to the task's console instead.

        `kwargs` go to the logger's `report_scalar` or `report_single_value`.
        """
        logger = self.task.get_logger()
        metrics, rest = numbers(values)
        warn_left_out(self.name, "numbers alone", rest)
        for key, value in metrics.items():
            if not math.isfinite(value):
                logger.report_text(f"{key} is {value}" + ("" if step is None else f" at step {step}"))
            elif step is None:
                logger.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = _title_and_series(key)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, titled as scalars are; `kwargs` go to the logger's `report_image`."""
        for key, value in values.items():
            title, series = _title_and_series(key)
            for name, image in named_images({series: value}):
                self.task.get_logger().report_image(
                    title=title, series=name, iteration=step, image=image, **kwargs
                )

    @on_main_process
    def _log_rows(
        self, table_name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        """Log a table, titled as scalars are; `kwargs` go to the logger's `report_table`."""
        title, series = _title_and_series(table_name)
        self.task.get_logger().report_table(
            title=title, series=series, iteration=step, table_plot=[columns, *rows], **kwargs
        )

    @on_main_process
    def finish(self) -> None:
        """End the task, if it was begun here."""
        if self._created_task:
            self.task.close()


def _title_and_series(name: str) -> tuple[str, str]:
    # transformers' Trainer begins the names of metrics so.
    for series in ("eval", "test", "train"):
        if name.startswith(f"{series}_"):
            return name.removeprefix(f"{series}_"), series
    return name, "train"
