"""SwanLab."""

from __future__ import annotations

from typing import Any

from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.values import images, numbers, plain
from accel_state.imports.packages import require

__all__ = ["SwanLabTracker"]


class SwanLabTracker(GeneralTracker):
    """Logs to an experiment of SwanLab; without network with `mode="offline"` or SWANLAB_MODE=offline.

    Args:
        run_name: The project's name.
        **kwargs: Further arguments of `swanlab.init`, such as `name`, `workspace` and `mode`.
    """

    name = "swanlab"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.run: Any = None
        self._kwargs = kwargs
        self._swanlab: Any = None

    @property
    def tracker(self) -> Any:
        """The run, as `swanlab.init` returns it."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begin the experiment."""
        self._swanlab = require("swanlab", extra="swanlab")
        self.run = self._swanlab.init(**{"project": self.run_name, **self._kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store `values`, nested as they are, in the experiment's `config`."""
        self.run.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, nested ones as `outer/inner`, media of SwanLab, and everything else as `swanlab.Text`.

        `kwargs` go to `swanlab.log`.
        """
        metrics, rest = numbers(values)
        media = {
            key: value if self._is_media(value) else self._swanlab.Text(str(value))
            for key, value in rest.items()
        }
        self.run.log({**metrics, **media}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` go to `swanlab.Image`."""
        for key, value in values.items():
            found = [self._swanlab.Image(image, **kwargs) for image in images(value)]
            self.run.log({key: found}, step=step)

    @on_main_process
    def finish(self) -> None:
        """End the experiment."""
        self.run.finish()

    def _is_media(self, value: Any) -> bool:
        items = value if isinstance(value, list) and value else [value]
        return all(type(item).__module__.startswith(("swanlab.", "pyecharts.")) for item in items)
