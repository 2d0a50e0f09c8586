"""TensorBoard, through torch's SummaryWriter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accel.trackers.base import GeneralTracker, on_main_process
from accel_state.imports.packages import require

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(GeneralTracker):
    """Writes event files to `logging_dir/run_name`.

    Args:
        run_name: The run's name, a folder under `logging_dir`.
        logging_dir: Where TensorBoard looks.
        **kwargs: Further arguments of `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = Path(logging_dir) / run_name
        self._kwargs = kwargs
        self._writer: Any = None

    @on_main_process
    def start(self) -> None:
        """Open the event file."""
        module = require("torch.utils.tensorboard", extra="tensorboard")
        self._writer = module.SummaryWriter(str(self.logging_dir), **self._kwargs)

    @property
    def tracker(self) -> Any:
        """The SummaryWriter."""
        return self._writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log `values` as hyper-parameters; what TensorBoard cannot show as one is stored as text."""
        plain = {
            key: value if isinstance(value, int | float | str) else str(value)
            for key, value in values.items()
        }
        # Without a name, they go to a folder named by the time.
        self._writer.add_hparams(plain, metric_dict={}, run_name=".")
        self._writer.flush()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, strings as text, and dicts of numbers as groups of scalars."""
        for key, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                # A file of events for each key, as TensorBoard groups runs.
                self._writer.add_scalars(key, value, global_step=step, **kwargs)
            else:
                self._writer.add_scalar(key, value, global_step=step, **kwargs)
        self._writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches of images (batch, channels, height, width)."""
        for key, images in values.items():
            self._writer.add_images(key, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()
