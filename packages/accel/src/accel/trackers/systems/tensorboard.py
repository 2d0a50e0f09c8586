"""TensorBoard, through torch's SummaryWriter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.values import flatten, images, is_number, numbers, plain
from accel_state.imports.packages import require


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
        self.writer: Any = None

    @on_main_process
    def start(self) -> None:
        """Open the event file."""
        module = require("torch.utils.tensorboard", extra="tensorboard")
        self.writer = module.SummaryWriter(str(self.logging_dir), **self._kwargs)

    @property
    def tracker(self) -> Any:
        """The SummaryWriter."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log `values` as hyper-parameters, nested ones as `outer/inner`, lists as text."""
        flat = flatten(plain(values))
        settings = {
            key: value if isinstance(value, int | float | str) else str(value) for key, value in flat.items()
        }
        # Without a name, they go to a folder named by the time.
        self.writer.add_hparams(settings, metric_dict={}, run_name=".")
        self.writer.flush()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, dicts of numbers as groups of scalars, and everything else as text.

        `kwargs` go to the writer's `add_scalar`, `add_scalars` or `add_text`.
        """
        for key, value in plain(values).items():
            if isinstance(value, dict):
                group, rest = numbers(value)
                if group:  # a file of events for each of its keys, as TensorBoard groups runs
                    self.writer.add_scalars(key, group, global_step=step, **kwargs)
                for name, item in rest.items():
                    self.writer.add_text(f"{key}/{name}", str(item), global_step=step, **kwargs)
            elif is_number(value):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            else:
                self.writer.add_text(key, str(value), global_step=step, **kwargs)
        # Shown at once, and not lost if the process is killed.
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` go to the writer's `add_images`.

        With `dataformats` among them, the values go there as they are.
        """
        for key, value in values.items():
            if "dataformats" in kwargs:
                self.writer.add_images(key, value, global_step=step, **kwargs)
                continue
            # (height, width, channels), as an image has to have here.
            found = [torch.from_numpy(image.reshape(*image.shape[:2], -1)) for image in images(value)]
            if len({image.shape for image in found}) == 1:  # one picture of them all
                batches = {key: torch.stack(found)}
            else:
                batches = {f"{key}/{index}": image[None] for index, image in enumerate(found)}
            for name, batch in batches.items():
                self.writer.add_images(name, batch, global_step=step, dataformats="NHWC", **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()
