"""SwanLab."""

from __future__ import annotations

from typing import Any

from accel.trackers.base import on_main_process
from accel.trackers.run import RunTracker
from accel.trackers.values import images, numbers


class SwanLabTracker(RunTracker):
    """Logs to an experiment of SwanLab; without network with `mode="offline"` or SWANLAB_MODE=offline.

    Args:
        run_name: The project's name.
        **kwargs: Further arguments of `swanlab.init`, such as `name`, `workspace` and `mode`.
    """

    name = "swanlab"

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, nested ones as `outer/inner`, media of SwanLab, and everything else as `swanlab.Text`.

        `kwargs` go to `swanlab.log`.
        """
        metrics, rest = numbers(values)
        media = {
            key: value if self._is_media(value) else self._library.Text(str(value))
            for key, value in rest.items()
        }
        self.run.log({**metrics, **media}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` go to `swanlab.Image`."""
        for key, value in values.items():
            found = [self._library.Image(image, **kwargs) for image in images(value)]
            self.run.log({key: found}, step=step)

    def _is_media(self, value: Any) -> bool:
        items = value if isinstance(value, list) and value else [value]
        return all(type(item).__module__.startswith(("swanlab.", "pyecharts.")) for item in items)
