"""Trackio: its database on this machine, read back."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import numpy
import pytest


def test_values_steps_config_images_and_tables(run_offline, tmp_path):
    run = run_offline("trackio", {"name": "run"}, TRACKIO_DIR=str(tmp_path / "folder"))
    with closing(sqlite3.connect(tmp_path / "folder/project.db")) as store:
        rows = store.execute("select run_name, step, metrics from metrics").fetchall()
        ((config,),) = store.execute("select config from configs").fetchall()
    found = {step: json.loads(metrics) for _, step, metrics in rows}

    assert run == {"warnings": [], "run": "trackio.run.Run"}
    assert {name for name, _, _ in rows} == {"run"}
    assert {key: value for key, value in json.loads(config).items() if not key.startswith("_")} == {
        "lr": 0.1,
        "model": {"sizes": [1, 2], "deep": {"norm": None, "eps": 1e-5}},
        "3": "number as a key",
    }
    assert [found[step] for step in (1, 2, 3)] == [{"train/loss": loss} for loss in (3.0, 2.0, 1.0)]
    assert found[4] == {"train/loss": "NaN"}
    assert found[5] == {"deep": {"x": {"y": 0.5}}, "flag": True, "note": "text"}
    pil = pytest.importorskip("PIL.Image")
    media = tmp_path / "folder/media"
    image = {
        name: numpy.asarray(pil.open(media / item["file_path"]).convert("RGB"))
        for name, item in found[6].items()
    }
    assert image["picture"].tolist() == [[[200, 0, 0]] * 5] * 4
    assert image["picture/1"].tolist() == [[[255, 255, 255]] * 4] * 6
    assert found[7]["table"]["_value"] == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
