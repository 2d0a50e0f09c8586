"""SwanLab, offline: the records of its run file, read back."""

from __future__ import annotations

import numpy
import pytest

READ = """
import glob, json
from offline_run import records
from swanlab.proto.swanlab.record.v1.record_pb2 import Record

found = {"scalars": [], "media": {}}
for data in records(glob.glob("folder/run-*/run-*.swanlab")[0]):
    record = Record.FromString(data)
    if record.HasField("start"):
        found["project"] = record.start.project
    if record.HasField("scalar"):
        found["scalars"].append([record.scalar.key, record.scalar.step, record.scalar.value.number])
    if record.HasField("media"):
        files = [item.filename for item in record.media.value.items]
        found["media"][record.media.key] = [record.media.step, files]
print("RESULT " + json.dumps(found))
"""


def test_values_steps_config_and_images(run_offline, read_back, tmp_path):
    run = run_offline("swanlab", {"mode": "offline", "log_dir": "folder"})
    found = read_back(READ)
    (folder,) = (tmp_path / "folder").glob("run-*")

    assert run["run"] == "swanlab.sdk.internal.run.Run"
    assert run["warnings"] == ["The swanlab tracker has no tables: they are not logged there."]
    assert found["project"] == "project"
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((folder / "files/config.yaml").read_text())
    assert {key: item["value"] for key, item in config.items()} == {
        "lr": 0.1,
        "model": {"sizes": [1, 2], "deep": {"norm": None, "eps": 1e-5}},
        "3": "number as a key",
    }
    (broken,) = [item for item in found["scalars"] if item[2] != item[2]]
    found["scalars"].remove(broken)
    assert broken[:2] == ["train/loss", 4]
    assert found["scalars"] == [
        ["train/loss", 1, 3.0],
        ["train/loss", 2, 2.0],
        ["train/loss", 3, 1.0],
        ["deep/x/y", 5, 0.5],
        ["flag", 5, 1.0],
    ]
    step, (text,) = found["media"]["note"]
    assert (step, (folder / "media/text" / text).read_text()) == (5, "text")
    pil = pytest.importorskip("PIL.Image")
    step, files = found["media"]["picture"]
    first, second = (numpy.asarray(pil.open(folder / "media/image" / name)) for name in files)
    assert step == 6
    assert first[:, :, :3].tolist() == [[[200, 0, 0]] * 5] * 4
    assert second[:, :, :3].tolist() == [[[255, 255, 255]] * 4] * 6
