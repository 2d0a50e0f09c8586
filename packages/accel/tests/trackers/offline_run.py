"""A run that logs to one tracker, for the tests of systems with their real libraries.

Started as `python offline_run.py NAME OPTIONS`, with the tracker's init_kwargs as JSON, in a folder of its
own. Prints the warnings that accel gave, and the type of the library's run object, as JSON on its last line.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

CONFIG = {"lr": 0.1, "model": {"sizes": [1, 2], "deep": {"norm": None, "eps": 1e-5}}, 3: "number as a key"}
NAN_STEP, DEEP_STEP = 4, 5


def run_offline(
    folder: Path, name: str, options: dict[str, Any] | None = None, **environment: str
) -> dict[str, Any]:
    """Run this file in `folder`, its home and working folder; skip where the library is missing."""
    from accel.trackers.registry import TRACKERS
    from accel_state.imports.packages import is_package_available

    library = TRACKERS[name].library
    if library is not None and not is_package_available(library):
        pytest.skip(f"{library} is not installed; `hatch run trackers:test` has it")
    kept = {
        key: value for key, value in os.environ.items() if key in ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    }
    run = subprocess.run(
        [sys.executable, __file__, name, json.dumps(options or {})],
        cwd=folder,
        env={**kept, "HOME": str(folder), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.rpartition("RESULT ")[2].splitlines()[0])


def log_everything(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Log steps 1 to 3, NaN at NAN_STEP, nested values at DEEP_STEP, images, and a table."""
    import numpy
    import torch

    from accel.accelerator import Accelerator

    os.environ["ACCELERATE_STRICT_TRACKERS"] = "1"
    accelerator = Accelerator(cpu=True, log_with=name, project_dir=".")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.init_trackers("project", config=CONFIG, init_kwargs={name: options})
        run = accelerator.get_tracker(name, unwrap=True)
        for step, loss in [(1, 3.0), (2, torch.tensor(2.0)), (3, numpy.float32(1.0))]:
            accelerator.log({"train/loss": loss}, step=step)
        accelerator.log({"train/loss": math.nan}, step=NAN_STEP)
        accelerator.log(
            {"deep": {"x": {"y": torch.tensor([0.5])}}, "flag": True, "note": "text"}, step=DEEP_STEP
        )
        colors = numpy.zeros((4, 5, 3), dtype=numpy.uint8)
        colors[:, :, 0] = 200
        accelerator.log_images({"picture": [colors, torch.ones(3, 6, 4)]}, step=6)
        accelerator.log_table("table", columns=["a", "b"], data=[[1, "x"], [2, "y"]], step=7)
        accelerator.end_training()
        accelerator.log({"late": 1})  # after the end: nothing
    ours = [str(item.message) for item in caught if "tracker" in str(item.message)]
    return {"warnings": ours, "run": f"{type(run).__module__}.{type(run).__qualname__}"}


if __name__ == "__main__":
    print("RESULT " + json.dumps(log_everything(sys.argv[1], json.loads(sys.argv[2]))), flush=True)
