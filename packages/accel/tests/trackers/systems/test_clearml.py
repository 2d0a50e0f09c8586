"""ClearML, offline: the archive of its session, read back."""

from __future__ import annotations

import io
import json
import zipfile

import numpy
import pytest


def test_values_steps_config_images_and_tables(run_offline, tmp_path):
    environment = {"CLEARML_OFFLINE_MODE": "1", "CLEARML_TASK": "from the environment"}
    run = run_offline("clearml", {"auto_connect_frameworks": False}, **environment)
    (path,) = (tmp_path / ".clearml/cache/offline").glob("*.zip")
    archive = zipfile.ZipFile(path)
    lines = archive.read("metrics.jsonl").splitlines() + archive.read("log.jsonl").splitlines()
    events = [event for line in lines for event in json.loads(line)]
    of_kind = {}
    for event in events:
        of_kind.setdefault(event["type"], []).append(event)
    task = json.loads(archive.read("task.json"))

    assert run["run"] == "clearml.task.Task"
    assert run["warnings"] == ["The clearml tracker logs numbers alone; it leaves out 'note' (str)."]
    assert task["name"] == "from the environment"
    for text in ("lr = 0.1", "sizes = [1, 2]", "norm = null", "eps = 1e-05", '"3" = "number as a key"'):
        assert text in task["configuration"]["General"]["value"]
    assert [(e["metric"], e["variant"], e["iter"], e["value"]) for e in of_kind["training_stats_scalar"]] == [
        ("train/loss", "train", 1, 3.0),
        ("train/loss", "train", 2, 2.0),
        ("train/loss", "train", 3, 1.0),
        ("deep/x/y", "train", 5, 0.5),
        ("flag", "train", 5, 1.0),
    ]
    assert "train/loss is nan at step 4" in "\n".join(event["msg"] for event in of_kind["log"])
    pil = pytest.importorskip("PIL.Image")
    pixels = {}
    for event in of_kind["training_debug_image"]:
        assert (event["metric"], event["iter"]) == ("picture", 6)
        image = numpy.asarray(pil.open(io.BytesIO(archive.read(f"data/{event['key']}"))))
        pixels[event["variant"]] = image.shape, image[0, 0].tolist()
    assert pixels["train/1"] == ((6, 4, 3), [255, 255, 255])
    assert pixels["train"][0] == (4, 5, 3)
    assert pixels["train"][1] == pytest.approx([200, 0, 0], abs=3)  # it is a JPEG
    (table,) = of_kind["plot"]
    assert (table["metric"], table["variant"], table["iter"]) == ("table", "train", 7)
    plot = json.loads(table["plot_str"])["data"][0]
    assert (plot["header"]["values"], plot["cells"]["values"]) == (["a", "b"], [[1, 2], ["x", "y"]])


MORE = """
import glob, json, zipfile
import clearml
from accel.tracking import ClearMLTracker
from offline_run import skip_analysis

skip_analysis()
task = clearml.Task.init("project", "script's own", auto_connect_frameworks=False)
tracker = ClearMLTracker("project")
tracker.start()
assert tracker.tracker is task
tracker.log({"eval_loss": 1.0, "test_acc": 2.0, "train_lr": 3.0, "other": 4.0}, step=2)
tracker.log({"single": 5.0})
tracker.finish()
assert clearml.Task.current_task() is task  # not ours to close
task.close()
(path,) = glob.glob(".clearml/cache/offline/*.zip")
lines = zipfile.ZipFile(path).read("metrics.jsonl").splitlines()
events = [event for line in lines for event in json.loads(line)]
print("RESULT " + json.dumps([[e["metric"], e["variant"], e["value"]] for e in events if "value" in e]))
"""


def test_series_by_prefix_single_values_and_a_task_of_the_script(read_back):
    pytest.importorskip("clearml", reason="clearml is not installed; `hatch run trackers:test` has it")
    script = "import os; os.environ['CLEARML_OFFLINE_MODE'] = '1'" + MORE

    assert read_back(script) == [
        ["loss", "eval", 1.0],
        ["acc", "test", 2.0],
        ["lr", "train", 3.0],
        ["other", "train", 4.0],
        ["Summary", "single", 5.0],
    ]
