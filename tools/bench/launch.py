"""Wall time of the launchers: with a script that only imports torch, and after the last worker has ended."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .commands import console_script, run
from .row import Row
from .timing import BASELINE, CONTROL, differences, interleave, ratios, spread

__all__ = ["launch_many_row", "launch_one_row", "shutdown_row"]

ONE_PROCESS_LIMIT_S = 0.2
TWO_PROCESSES_LIMIT = 0.7
SHUTDOWN_LIMIT_S = 0.2

IMPORT = "import torch\n"
LAST_ACT = """
import os, sys, time
time.sleep(0.5)  # the launcher has long come to waiting
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(str(time.monotonic()))
os._exit(0)  # at once: what an interpreter clears away is no part of the launcher's time
"""


def launch_one_row(*, quick: bool = False) -> Row:
    """Measure what the launcher adds to one process, compared with running the script with python."""
    with tempfile.TemporaryDirectory() as folder:
        script = _script(folder, IMPORT)
        measures = {
            BASELINE: _wall_s([sys.executable, script]),
            CONTROL: _wall_s([sys.executable, script]),
            **{name: _wall_s([*command, script]) for name, command in _launchers(1).items()},
        }
        samples = interleave(measures, rounds=3 if quick else 7)
    added = differences(samples)
    return Row(
        what="`accel launch script.py`, 1 process: wall seconds over `python script.py`",
        value=added["accel"].median,
        limit=ONE_PROCESS_LIMIT_S,
        unit="s",
        peers={name: added[name].median for name in ("accelerate",) if name in added},
        noise=added[CONTROL],
        base=f"{spread(samples[BASELINE]).median:.2f} s",
    )


def launch_many_row(*, quick: bool = False) -> Row:
    """Measure a launch of two processes, compared with torchrun's."""
    with tempfile.TemporaryDirectory() as folder:
        script = _script(folder, IMPORT)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        measures = {
            BASELINE: _wall_s([*torchrun, script]),
            CONTROL: _wall_s([*torchrun, script]),
            "accel": _wall_s([*_launchers(2)["accel"], script]),  # accelerate starts one process on a CPU
        }
        samples = interleave(measures, rounds=3 if quick else 7)
    compared = ratios(samples)
    return Row(
        what="`accel launch script.py`, 2 processes: wall time / torchrun",
        value=compared["accel"].median,
        limit=TWO_PROCESSES_LIMIT,
        noise=compared[CONTROL],
        base=f"{spread(samples[BASELINE]).median:.2f} s",
    )


def shutdown_row(*, quick: bool = False) -> Row:
    """Measure how long the launcher of two processes lives on when both have ended."""
    with tempfile.TemporaryDirectory() as folder:
        script = _script(folder, LAST_ACT)
        measure = _outlives_s([*_launchers(2)["accel"], script])
        samples = interleave({"accel": measure}, rounds=3 if quick else 7)
    return Row(
        what="`accel launch script.py`, 2 processes: wall seconds from the end of the last to the launcher's",
        value=spread(samples["accel"]).median,
        limit=SHUTDOWN_LIMIT_S,
        unit="s",
    )


def _script(folder: str, text: str) -> str:
    script = Path(folder) / "script.py"
    script.write_text(text)
    return str(script)


def _launchers(size: int) -> dict[str, list[str]]:
    found = {name: console_script(name) for name in ("accel", "accelerate")}
    return {
        name: [sys.executable, path, "launch", "--num_processes", str(size), "--cpu"]
        for name, path in found.items()
        if path
    }


def _wall_s(command: list[str]) -> Callable[[], float]:
    return lambda: run(command).wall_s


def _outlives_s(command: list[str]) -> Callable[[], float]:
    """Return a measure of the time from the last act of the last of two workers to the command's end."""

    def measure() -> float:
        with tempfile.TemporaryDirectory() as folder:
            run([*command, folder])
            ended = time.monotonic()
            last_acts = [float(path.read_text()) for path in Path(folder).iterdir()]
        if len(last_acts) != 2:
            raise RuntimeError(f"{' '.join(command)}: {len(last_acts)} workers ran, not 2")
        return ended - max(last_acts)

    return measure
