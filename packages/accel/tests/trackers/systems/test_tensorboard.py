"""TensorBoard's real event files, read back."""

from __future__ import annotations

import io
import math

import numpy
import pytest
import torch

from accel.accelerator import Accelerator
from accel.tracking import TensorBoardTracker

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
pytestmark = pytest.mark.usefixtures("fresh_state")

VALUES = {
    "loss": torch.tensor(0.5),
    "count": numpy.int64(3),
    "broken": math.nan,
    "note": "text",
    "list": [1, 2],
    "pair": {"a": 1.0, "b": torch.tensor([2.0]), "deep": {"c": 3, "s": "words"}},
}


def read(folder):
    events = accumulator.EventAccumulator(str(folder), size_guidance={accumulator.IMAGES: 0})
    events.Reload()
    return events


def text(events, tag):
    (event,) = events.Tensors(f"{tag}/text_summary")
    return event.tensor_proto.string_val[0].decode()


def test_event_files_read_back(tmp_path):
    accelerator = Accelerator(log_with="tensorboard", project_dir=str(tmp_path))
    config = {"lr": 0.1, "layers": [1, 2], "model": {"deep": {"norm": None}, "width": numpy.int64(8)}}
    accelerator.init_trackers("run", config=config)
    tracker = accelerator.get_tracker("tensorboard")
    assert isinstance(tracker, TensorBoardTracker)
    assert accelerator.get_tracker("tensorboard", unwrap=True) is tracker.writer
    for step in range(3):
        accelerator.log({"loss": 1.0 / (step + 1)}, step=step)
    accelerator.log(VALUES, step=3)
    accelerator.end_training()
    events = read(tmp_path / "run")

    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2, 3]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([1.0, 0.5, 1 / 3, 0.5])
    assert events.Scalars("count")[0].value == 3
    assert math.isnan(events.Scalars("broken")[0].value)
    assert (text(events, "note"), text(events, "list"), text(events, "pair/deep/s")) == (
        "text",
        "[1, 2]",
        "words",
    )
    group = {
        name: read(tmp_path / "run" / f"pair_{name}").Scalars("pair")[0].value
        for name in ("a", "b", "deep/c")
    }
    assert group == {"a": 1.0, "b": 2.0, "deep/c": 3.0}
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for part in (b"lr", b"model/width", b"model/deep/norm", b"None", b"layers", b"[1, 2]"):
        assert part in content


def test_images_read_back(tmp_path):
    pil = pytest.importorskip("PIL.Image")
    accelerator = Accelerator(log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("run")
    batch = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    accelerator.log_images(
        {
            "one": batch[0],
            "grey": numpy.full((4, 5), 7, dtype=numpy.uint8),
            "sizes": [batch[0], batch[1, :, :3]],
            "batch": batch,
        },
        step=2,
    )
    formatted = {"tensorboard": {"dataformats": "NCHW"}}
    accelerator.log_images({"formatted": batch[:1]}, step=2, log_kwargs=formatted)
    with pytest.warns(UserWarning, match="The tensorboard tracker has no tables"):
        accelerator.log_table("table", ["a"], [[1]])
    accelerator.end_training()
    events = read(tmp_path / "run")

    def image(tag):
        (event,) = events.Images(tag)
        assert event.step == 2
        return numpy.asarray(pil.open(io.BytesIO(event.encoded_image_string)))

    last = batch.permute(0, 2, 3, 1).numpy()
    assert numpy.array_equal(image("one"), last[0])
    assert numpy.array_equal(image("formatted"), last[0])
    assert numpy.array_equal(image("grey"), numpy.full((4, 5, 3), 7))
    assert numpy.array_equal(image("sizes/0"), last[0])
    assert numpy.array_equal(image("sizes/1"), last[1, :3])
    assert image("batch").shape == (4, 10, 3)  # side by side
