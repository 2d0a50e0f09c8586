"""MLflow: its sqlite store and its artifacts, read back."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import numpy
import pytest


def test_values_steps_config_images_and_tables(run_offline, tmp_path):
    options = {"run_name": "name", "tags": {"kind": "argument"}, "logging_dir": "folder"}
    environment = {"MLFLOW_TRACKING_URI": "sqlite:///store.db", "MLFLOW_TAGS": '{"kind": "environment"}'}
    run = run_offline("mlflow", options, **environment)
    with closing(sqlite3.connect(tmp_path / "store.db")) as store:
        metrics = store.execute("select key, step, value, is_nan from metrics").fetchall()
        params = dict(store.execute("select key, value from params").fetchall())
        tags = dict(store.execute("select key, value from tags").fetchall())
        places = dict(store.execute("select name, artifact_location from experiments").fetchall())
        runs = store.execute("select name, status from runs").fetchall()

    assert run["run"] == "mlflow.tracking.fluent.ActiveRun"
    assert run["warnings"] == ["The mlflow tracker logs numbers alone; it leaves out 'note' (str)."]
    assert params == {
        "lr": "0.1",
        "model/sizes": "[1, 2]",
        "model/deep/norm": "None",
        "model/deep/eps": "1e-05",
        "3": "number as a key",
    }
    assert set(metrics) == {
        ("train/loss", 1, 3.0, 0),
        ("train/loss", 2, 2.0, 0),
        ("train/loss", 3, 1.0, 0),
        ("train/loss", 4, 0.0, 1),  # how MLflow stores NaN
        ("deep/x/y", 5, 0.5, 0),
        ("flag", 5, 1.0, 0),
    }
    assert (runs, tags["kind"]) == ([("name", "FINISHED")], "environment")
    assert places["project"] == (tmp_path / "folder").as_uri()
    (artifacts,) = (tmp_path / "folder").glob("*/artifacts")
    table = json.loads((artifacts / "table.json").read_text())
    assert table == {"columns": ["a", "b", "step"], "data": [[1, "x", 7], [2, "y", 7]]}
    pil = pytest.importorskip("PIL.Image")
    (first,) = artifacts.glob("images/picture+step+6+*[0-9a-f].png")
    (second,) = artifacts.glob("images/picture~1+step+6+*[0-9a-f].png")
    assert numpy.asarray(pil.open(first)).tolist() == [[[200, 0, 0]] * 5] * 4
    assert numpy.asarray(pil.open(second)).tolist() == [[[255, 255, 255]] * 4] * 6


MORE = """
import json
import mlflow
from accel.tracking import MLflowTracker

tracker = MLflowTracker("project", run_name="first")
tracker.start()
tracker.store_init_configuration({"layers[0]": "x" * 7000})
tracker.log({"acc@1": 0.5})
tracker.log_artifact("file.txt")
tracker.log_artifacts("several", "inside")
child = MLflowTracker("project", nested_run=True)
child.start()
tracker.log({"loss": 1.0}, step=2)  # goes to its own run, not to the active one
child.finish()
tracker.finish()
run_id = tracker.tracker.info.run_id
again = MLflowTracker("project", run_id=run_id)
again.start()
again.log({"loss": 0.5}, step=3)
again.finish()
client = mlflow.MlflowClient()
data = client.get_run(run_id).data
child_tags = client.get_run(child.tracker.info.run_id).data.tags
print("RESULT " + json.dumps({
    "metrics": data.metrics,
    "params": {key: len(value) for key, value in data.params.items()},
    "artifacts": [item.path for item in client.list_artifacts(run_id)],
    "child": child_tags["mlflow.parentRunId"] == run_id,
}))
"""


def test_names_artifacts_and_runs_that_continue(read_back, tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is not installed; `hatch run trackers:test` has it")
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "other.txt").write_text("text")

    assert read_back(MORE) == {
        "metrics": {"acc_1": 0.5, "loss": 0.5},
        "params": {"layers_0_": 6000},
        "artifacts": ["file.txt", "inside"],
        "child": True,
    }
