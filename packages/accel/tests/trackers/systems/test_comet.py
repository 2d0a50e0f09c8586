"""Comet, offline: the archive that `comet upload` sends, read back."""

from __future__ import annotations

import io
import json
import zipfile

import numpy
import pytest


def test_values_steps_config_images_and_tables(run_offline, tmp_path):
    run = run_offline("comet_ml", {"online": False}, COMET_OFFLINE_DIRECTORY=str(tmp_path / "folder"))
    (path,) = (tmp_path / "folder").glob("*.zip")
    archive = zipfile.ZipFile(path)
    messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    messages = [(message["type"], message["payload"]) for message in messages]
    metrics = {}
    for _, payload in messages:
        metric = payload.get("metric", {})
        if metric.get("metricName") in ("train/loss", "deep/x/y", "flag", "late"):  # not those of the system
            metrics[metric["metricName"], metric["step"]] = metric["metricValue"]
    params = [
        payload.get("param") or payload["params"] for kind, payload in messages if kind == "parameter_msg"
    ]
    other = {payload["key"]: payload["value"] for kind, payload in messages if kind == "log_other"}
    uploads = [payload for kind, payload in messages if "upload_type" in payload]

    assert run == {"warnings": [], "run": "comet_ml.offline.OfflineExperiment"}
    assert json.loads(archive.read("experiment.json"))["project_name"] == "project"
    config = {item["paramName"]: item["paramValue"] for item in params if item["source"] == "manual"}
    config.pop("curr_step")
    assert config == {
        "lr": 0.1,
        "model|sizes": [1, 2],
        "model|deep|norm": None,
        "model|deep|eps": 1e-5,
        "3": "number as a key",
    }
    assert metrics == {
        ("train/loss", 1): 3.0,
        ("train/loss", 2): 2.0,
        ("train/loss", 3): 1.0,
        ("train/loss", 4): "NaN",
        ("deep/x/y", 5): 0.5,
        ("flag", 5): 1,
    }
    assert other["note"] == "text"
    pil = pytest.importorskip("PIL.Image")
    found = {item["additional_params"].get("figName"): item for item in uploads}
    for name, expected in {
        "picture": [[[200, 0, 0]] * 5] * 4,
        "picture/1": [[[255, 255, 255]] * 4] * 6,
    }.items():
        assert found[name]["additional_params"]["step"] == 6
        image = pil.open(io.BytesIO(archive.read(found[name]["file_path"])))
        assert numpy.asarray(image).tolist() == expected
    (table,) = [item for item in uploads if item["additional_params"].get("fileName") == "table_7.csv"]
    assert table["additional_params"]["step"] == 7
    assert archive.read(table["file_path"]).decode().split() == ["a,b", "1,x", "2,y"]
