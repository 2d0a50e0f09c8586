"""Weights & Biases, offline: the records of its run file, read back."""

from __future__ import annotations

import json

import numpy
import pytest

READ = """
import glob, json
from offline_run import records
from wandb.proto.wandb_internal_pb2 import Record

found = {"config": {}, "history": {}}
for data in records(glob.glob("folder/wandb/offline-run-*/run-*.wandb")[0]):
    record = Record.FromString(data)
    kind = record.WhichOneof("record_type")
    if kind == "run":
        found["project"], found["tags"] = record.run.project, list(record.run.tags)
    if kind == "config":
        found["config"].update({item.key: json.loads(item.value_json) for item in record.config.update})
    if kind == "history":
        items = found["history"][record.history.step.num] = {}
        for item in record.history.item:
            items[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
print("RESULT " + json.dumps(found))
"""


def test_values_steps_config_images_and_tables(run_offline, read_back, tmp_path):
    options = {"dir": "folder", "tags": ["one"]}
    run = run_offline("wandb", options, WANDB_MODE="offline")
    found = read_back(READ)
    history = {int(step): items for step, items in found["history"].items()}

    assert run == {"warnings": [], "run": "wandb.sdk.wandb_run.Run"}
    assert (found["project"], found["tags"]) == ("project", ["one"])
    assert found["config"] == {
        "lr": 0.1,
        "model": {"sizes": [1, 2], "deep": {"norm": None, "eps": 1e-5}},
        "3": "number as a key",
    }
    assert [history[step]["train/loss"] for step in (1, 2, 3)] == [3, 2, 1]
    assert history[4]["train/loss"] != history[4]["train/loss"]  # NaN
    assert (history[5]["deep/x/y"], history[5]["flag"], history[5]["note"]) == (0.5, True, "text")
    pil = pytest.importorskip("PIL.Image")
    (files,) = tmp_path.glob("folder/wandb/offline-run-*/files")
    first, second = (numpy.asarray(pil.open(files / name)) for name in history[6]["picture/filenames"])
    assert first.tolist() == [[[200, 0, 0]] * 5] * 4
    assert second.tolist() == [[[255, 255, 255]] * 4] * 6
    table = json.loads((files / history[7]["table/path"]).read_text())
    assert (table["columns"], table["data"]) == (["a", "b"], [[1, "x"], [2, "y"]])
