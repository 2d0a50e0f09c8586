"""The tracker without dependencies: its lines, while a run continues, after a kill, and their cost."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time

import numpy
import pytest
import torch

from accel.accelerator import Accelerator
from accel.trackers.systems.jsonl import JSONLTracker

pytestmark = pytest.mark.usefixtures("fresh_state")


def refuse(name):
    raise AssertionError(f"{name} is not JSON")


def complete(path):
    """Return what is there up to the last newline; what follows is being written, or was at a kill."""
    text = path.read_text()
    return text[: text.rfind("\n") + 1]


def lines(path):
    return [json.loads(line, parse_constant=refuse) for line in complete(path).splitlines()]


def without_time(path):
    return [{key: value for key, value in line.items() if key != "time"} for line in lines(path)]


def test_every_call_is_a_line_that_can_be_read_at_once(tmp_path):
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    path = tmp_path / "project.jsonl"
    accelerator.init_trackers("project", config={"lr": 0.1, "model": {"sizes": (1, 2)}})
    assert without_time(path) == [{"run": "project", "config": {"lr": 0.1, "model": {"sizes": [1, 2]}}}]
    accelerator.log({"loss": torch.tensor(2.5), "deep": {"x": {1: numpy.float32(0.5)}}}, step=3)
    assert without_time(path)[1:] == [{"step": 3, "values": {"loss": 2.5, "deep": {"x": {"1": 0.5}}}}]
    accelerator.log({"note": "tëxt"}, log_kwargs={"jsonl": {"split": "eval"}})
    accelerator.log_table("table", columns=["a", "b"], data=[[1, "x"]], step=4)
    assert accelerator.get_tracker("jsonl", unwrap=True) == path
    accelerator.end_training()

    assert without_time(path)[2:] == [
        {"step": None, "values": {"note": "tëxt"}, "split": "eval"},
        {"step": 4, "table": "table", "columns": ["a", "b"], "data": [[1, "x"]]},
    ]
    assert all(isinstance(line["time"], float) for line in lines(path))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [float, torch.tensor, numpy.float32, numpy.float64])
def test_numbers_that_json_does_not_have_are_text(tmp_path, number, wrap):
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    tracker.log({"loss": wrap(number), "deep": {("a", 1): [wrap(number)]}}, step=1)
    tracker.finish()
    (line,) = lines(tracker.path)
    loss, deep = line["values"]["loss"], line["values"]["deep"]["('a', 1)"]

    assert loss == {math.inf: "Infinity", -math.inf: "-Infinity"}.get(number, "NaN")
    assert repr(float(loss)) == repr(number)
    assert deep == [loss]


def test_images_are_png_files(tmp_path):
    pil = pytest.importorskip("PIL.Image")
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("project")
    color = torch.arange(24, dtype=torch.uint8).view(3, 2, 4)
    grey = numpy.array([[0, 255], [7, 9]], dtype=numpy.uint8)
    accelerator.log_images({"val/picture": [color, grey]}, step=2)
    accelerator.end_training()
    (line,) = without_time(tmp_path / "project.jsonl")
    first, second = line["images"]["val/picture"]

    assert (first, second) == ("project_images/val_picture_2_0.png", "project_images/val_picture_2_1.png")
    assert numpy.array_equal(numpy.asarray(pil.open(tmp_path / first)), color.permute(1, 2, 0))
    assert numpy.array_equal(numpy.asarray(pil.open(tmp_path / second)), grey)


def test_no_picture_takes_the_place_of_another_one(tmp_path):
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    for _ in range(2):  # a run that continues
        accelerator.init_trackers("project")
        for value in (0, 255):
            accelerator.log_images({"a": numpy.full((1, 1), value, dtype=numpy.uint8)})
        accelerator.log_images({"b/c": torch.zeros(1, 1), "b_c": torch.ones(1, 1)}, step=1)
    with pytest.warns(UserWarning, match="TypeError: the jsonl tracker writes tensors.*; got str"):
        accelerator.log_images({"a": "picture.png"})
    accelerator.end_training()
    found = [line["images"].values() for line in lines(tmp_path / "project.jsonl")]
    paths = [path for values in found for item in values for path in item]

    assert len(paths) == len(set(paths)) == len(list((tmp_path / "project_images").iterdir())) == 8
    pil = pytest.importorskip("PIL.Image")
    assert [pil.open(tmp_path / path).getpixel((0, 0)) for path in paths] == [0, 255] * 4


KILLED = """
import os, signal, sys, time
from accel.trackers.systems.jsonl import JSONLTracker
tracker = JSONLTracker("run", sys.argv[1])
tracker.start()
tracker.store_init_configuration({"lr": 0.1})
print("started", flush=True)
step = 0
while True:
    step += 1
    tracker.log({"loss": 1 / step, "text": "x" * 2000}, step=step)
"""


def test_what_was_logged_before_a_kill_is_there_and_the_run_continues_in_the_file(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "started\n"
    path = tmp_path / "run.jsonl"
    while len(path.read_bytes()) < 100_000:  # read while it is written
        assert process.poll() is None
        lines(path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    found = lines(path)
    assert found[0]["config"] == {"lr": 0.1}
    assert [line["step"] for line in found[1:]] == list(range(1, len(found)))

    path.write_text(complete(path) + '{"half')  # as after a kill within a write
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    tracker.log({"loss": 0.0}, step=99)
    tracker.finish()
    *_, half, last = path.read_text().splitlines()
    assert half == '{"half'
    assert json.loads(last)["step"] == 99


def test_a_closed_file_and_a_full_disk_are_errors(tmp_path, monkeypatch):
    tracker = JSONLTracker("run", tmp_path)
    with pytest.raises(RuntimeError, match="is not open: call init_trackers first"):
        tracker.log({})
    tracker.start()
    import resource

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
        with pytest.raises(OSError, match="only 10 of"):
            tracker.log({"loss": 1.0})
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        tracker.log({"loss": 2.0})  # there is room again
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
        tracker.finish()
    tracker.finish()
    half, last = tracker.path.read_text().splitlines()
    assert len(half) == 10
    assert json.loads(last)["values"] == {"loss": 2.0}


def test_a_call_costs_at_most_20_microseconds(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("project")
    values = {"loss": 0.123456, "lr": 1e-3, "grad_norm": 2.5, "epoch": 3, "samples": 12345}
    costs = []
    for _ in range(10):  # the processor's time, as other programs run meanwhile
        start = time.process_time()
        for step in range(1000):
            accelerator.log(values, step=step)
        costs.append((time.process_time() - start) / 1000)
    accelerator.end_training()

    assert min(costs) <= 20e-6
