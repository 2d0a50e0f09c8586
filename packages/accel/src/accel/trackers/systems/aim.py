"""Aim."""

from __future__ import annotations

import os
from typing import Any

from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.values import images, numbers, plain
from accel_state.imports.packages import require


class AimTracker(GeneralTracker):
    """Logs to a run of Aim, in the repository `logging_dir/.aim`.

    Args:
        run_name: The run's name.
        logging_dir: The folder of the repository.
        **kwargs: Further arguments of `aim.Run`, such as `experiment` and `system_tracking_interval`.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = logging_dir
        self.writer: Any = None
        self._kwargs = kwargs
        self._aim: Any = None

    @property
    def tracker(self) -> Any:
        """The `aim.Run`."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        self._aim = require("aim", extra="aim")
        repo = None if self.logging_dir is None else os.fspath(self.logging_dir)
        # A repository among the arguments comes before the folder.
        self.writer = self._aim.Run(**{"repo": repo, **self._kwargs})
        self.writer.name = self.run_name

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store `values`, nested as they are, under the run's key "hparams"."""
        self.writer["hparams"] = plain(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track numbers, nested ones as `outer/inner`, objects of Aim, and everything else as `aim.Text`.

        `kwargs` go to `aim.Run.track`, such as `epoch` and `context`.
        """
        metrics, rest = numbers(values)
        for key, value in metrics.items():
            self.writer.track(value, name=key, step=step, **kwargs)
        for key, value in rest.items():
            item = value if type(value).__module__.startswith("aim.") else self._aim.Text(str(value))
            self.writer.track(item, name=key, step=step, **kwargs)

    @on_main_process
    def log_images(  # type: ignore[override]  # its documented signature
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Track images.

        Args:
            values: By name: an image, a batch or a list of images, or a pair of an image and its caption.
            step: The step.
            kwargs: Under "aim_image" further arguments of `aim.Image`, under "track" of `aim.Run.track`.
        """
        options = kwargs or {}
        for key, value in values.items():
            caption = {}
            if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
                value, caption = value[0], {"caption": value[1]}
            about = {**caption, **options.get("aim_image", {})}
            found = [self._image(image, about) for image in images(value)]
            self.writer.track(
                found[0] if len(found) == 1 else found, name=key, step=step, **options.get("track", {})
            )

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.writer.close()

    def _image(self, image: Any, about: dict[str, Any]) -> Any:
        return image if isinstance(image, self._aim.Image) else self._aim.Image(image, **about)
