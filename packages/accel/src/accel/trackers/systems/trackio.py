"""Trackio."""

from __future__ import annotations

from typing import Any

from accel.trackers.base import on_main_process
from accel.trackers.run import RunTracker
from accel.trackers.values import named_images, plain, table_rows, unchanged


class TrackioTracker(RunTracker):
    """Logs to a run of Trackio, in the database of its project on this machine, or in a space of the hub.

    Args:
        run_name: The project's name.
        **kwargs: Further arguments of `trackio.init`, such as `name` and `space_id`.
    """

    name = "trackio"

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values, nested as they are, and Trackio's own media; `kwargs` go to `trackio.Run.log`."""
        self.run.log(plain(values, unchanged), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, each under its own name; `kwargs` go to `trackio.Image`."""
        found = {name: self._library.Image(image, **kwargs) for name, image in named_images(values)}
        self.run.log(found, step=step)

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
        """Log a `trackio.Table`; `kwargs` go to it."""
        if dataframe is None:
            columns, data = table_rows(columns, data, None)
        table = self._library.Table(columns=columns, data=data, dataframe=dataframe, **kwargs)
        self.run.log({table_name: table}, step=step)
