"""DVCLive: the files of its folder, read back."""

from __future__ import annotations

import json

import numpy
import pytest


def test_values_steps_config_and_images(run_offline, tmp_path):
    run = run_offline("dvclive", {"save_dvc_exp": False, "dir": "folder"})
    folder = tmp_path / "folder"

    def rows(name):
        lines = (folder / f"plots/metrics/{name}.tsv").read_text().splitlines()
        return [line.split("\t") for line in lines[1:]]

    assert run["run"] == "dvclive.live.Live"
    assert run["warnings"] == ["The dvclive tracker has no tables: they are not logged there."]
    yaml = pytest.importorskip("yaml")
    params = yaml.safe_load((folder / "params.yaml").read_text())
    eps = params["model"]["deep"]["eps"]
    params["model"]["deep"]["eps"] = float(eps)  # 1e-05 is text for PyYAML, and a number in YAML 1.2
    assert params == {
        "lr": 0.1,
        "model": {"sizes": [1, 2], "deep": {"norm": None, "eps": 1e-5}},
        "3": "number as a key",
    }
    assert rows("train/loss") == [["1", "3.0"], ["2", "2.0"], ["3", "1.0"], ["4", "nan"]]
    assert (rows("deep/x/y"), rows("flag"), rows("note")) == ([["5", "0.5"]], [["5", "1"]], [["5", "text"]])
    summary = json.loads((folder / "metrics.json").read_text())
    assert (summary["note"], summary["deep"]) == ("text", {"x": {"y": 0.5}})
    pil = pytest.importorskip("PIL.Image")
    images = folder / "plots/images"
    assert numpy.asarray(pil.open(images / "picture.png")).tolist() == [[[200, 0, 0]] * 5] * 4
    assert numpy.asarray(pil.open(images / "picture_1.png")).tolist() == [[[255, 255, 255]] * 4] * 6
