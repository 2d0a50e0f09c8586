"""Aim: its repository, read back through aim."""

from __future__ import annotations

READ = """
import json
import aim
from aim.storage.context import Context

repo = aim.Repo(".")
(name,) = repo.list_all_runs()
run = aim.Run(name, repo=repo, system_tracking_interval=None)
metrics = {}
for metric in run.metrics():
    if not metric.name.startswith("__"):
        steps, (values, *_) = metric.data.items_list()
        metrics[metric.name] = list(zip(steps, values))
pictures = run.get_image_sequence("picture", Context({})).data.items_list()
shown = [image.to_pil_image() for image in pictures[1][0][0]]
texts = run.get_text_sequence("note", Context({})).data.items_list()
print("RESULT " + json.dumps({
    "name": run.name,
    "experiment": run.experiment,
    "config": run["hparams"],
    "metrics": metrics,
    "pictures": [pictures[0], [[image.size, image.getpixel((0, 0))] for image in shown]],
    "texts": [texts[0], [text.data for text in texts[1][0]]],
}))
"""


def test_values_steps_config_and_images(run_offline, read_back):
    run = run_offline("aim", {"experiment": "tests"})
    found = read_back(READ)

    assert run["run"] == "aim.sdk.run.Run"
    assert run["warnings"] == ["The aim tracker has no tables: they are not logged there."]
    assert (found["name"], found["experiment"]) == ("project", "tests")
    assert found["config"] == {
        "lr": 0.1,
        "model": {"sizes": [1, 2], "deep": {"norm": None, "eps": 1e-5}},
        "3": "number as a key",
    }
    *finite, (last, broken) = found["metrics"].pop("train/loss")
    assert finite == [[1, 3.0], [2, 2.0], [3, 1.0]]
    assert last == 4
    assert broken != broken  # NaN
    assert found["metrics"] == {"deep/x/y": [[5, 0.5]], "flag": [[5, 1.0]]}
    assert found["texts"] == [[5], ["text"]]
    assert found["pictures"] == [[6], [[[5, 4], [200, 0, 0]], [[4, 6], [255, 255, 255]]]]
