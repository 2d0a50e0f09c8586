"""DVCLive."""

from __future__ import annotations

from typing import Any

from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.values import named_images, numbers, plain, warn_left_out
from accel_state.imports.packages import require


class DVCLiveTracker(GeneralTracker):
    """Writes the files of a DVCLive folder.

    Args:
        run_name: Not used: DVCLive names experiments by its argument `exp_name`.
        live: A `dvclive.Live` to log to; by default one is made.
        **kwargs: Arguments of the `dvclive.Live` that is made, such as `dir` and `save_dvc_exp`.
    """

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.live: Any = live
        self._kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The `dvclive.Live`."""
        return self.live

    @on_main_process
    def start(self) -> None:
        """Make the `Live`, unless one was given."""
        dvclive = require("dvclive", extra="dvclive")
        if self.live is None:
            self.live = dvclive.Live(**self._kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store `values`, nested as they are, in `params.yaml`."""
        self.live.log_params(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text, nested ones as `outer/inner`, and advance to the next step.

        `kwargs` go to `Live.log_metric`.
        """
        metrics, rest = numbers(values)
        text = {key: value for key, value in rest.items() if isinstance(value, str)}
        warn_left_out(self.name, "numbers and text", {key: rest[key] for key in rest.keys() - text})
        if step is not None:
            self.live.step = step
        for key, value in {**metrics, **text}.items():
            self.live.log_metric(key, value, **kwargs)
        # DVCLive counts steps by these calls, and writes its summary and report in them.
        self.live.next_step()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images as `NAME.png` and `NAME_INDEX.png`, in DVCLive's folder of the step."""
        if step is not None:
            self.live.step = step
        for name, image in named_images(values, separator="_"):
            self.live.log_image(f"{name}.png", image, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Write the summary, and end the experiment."""
        self.live.end()
