"""A run that logs everything to one tracker, for the tests of trackers with their real libraries.

Started as `python offline_run.py NAME OPTIONS`, with the tracker's init_kwargs as JSON. Prints RESULT and, as
JSON, the warnings of accel and the type of the library's run object.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import warnings
from pathlib import Path

CONFIG = {"lr": 0.1, "model": {"sizes": [1, 2], "deep": {"norm": None, "eps": 1e-5}}, 3: "number as a key"}


def log_everything(name, options):
    """Log steps 1 to 3, NaN at 4, nested values at 5, images at 6, and a table at 7."""
    import numpy
    import torch

    from accel.accelerator import Accelerator

    os.environ["ACCELERATE_STRICT_TRACKERS"] = "1"
    if name == "clearml":
        skip_analysis()
    accelerator = Accelerator(cpu=True, log_with=name, project_dir=".")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.init_trackers("project", config=CONFIG, init_kwargs={name: options})
        run = accelerator.get_tracker(name, unwrap=True)
        for step, loss in [(1, 3.0), (2, torch.tensor(2.0)), (3, numpy.float32(1.0))]:
            accelerator.log({"train/loss": loss}, step=step)
        accelerator.log({"train/loss": math.nan}, step=4)
        accelerator.log({"deep": {"x": {"y": torch.tensor([0.5])}}, "flag": True, "note": "text"}, step=5)
        colors = numpy.zeros((4, 5, 3), dtype=numpy.uint8)
        colors[:, :, 0] = 200
        accelerator.log_images({"picture": [colors, torch.ones(3, 6, 4)]}, step=6)
        accelerator.log_table("table", columns=["a", "b"], data=[[1, "x"], [2, "y"]], step=7)
        accelerator.end_training()
        accelerator.log({"late": 1})  # after the end: nothing
    ours = [str(item.message) for item in caught if " tracker " in str(item.message)]
    return {"warnings": ours, "run": f"{type(run).__module__}.{type(run).__qualname__}"}


def skip_analysis():
    """Keep ClearML from reading every installed package, for minutes in a new environment."""
    import clearml

    Path("requirements.txt").write_text("torch\n")
    clearml.Task.force_requirements_env_freeze(requirements_file="requirements.txt")


def records(path):
    """Yield the records of a file of W&B or SwanLab: a header of 7 bytes, then the log format of LevelDB."""
    data = Path(path).read_bytes()
    place, parts = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no record begins in the last bytes of a block
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


if __name__ == "__main__":
    print("RESULT " + json.dumps(log_everything(sys.argv[1], json.loads(sys.argv[2]))), flush=True)
