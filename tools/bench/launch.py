"""Wall time of the launchers, for a script that only imports torch."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from .commands import console_script, run
from .row import Row
from .timing import BASELINE, CONTROL, differences, interleave, ratios, spread

__all__ = ["launch_many_row", "launch_one_row"]

ONE_PROCESS_LIMIT_S = 0.2
TWO_PROCESSES_LIMIT = 0.7


def launch_one_row(*, quick: bool = False) -> Row:
    """Measure what the launcher adds to one process, beside running the script with python."""
    with tempfile.TemporaryDirectory() as folder:
        script = _script(folder)
        measures = {
            BASELINE: _wall_s([sys.executable, script]),
            CONTROL: _wall_s([sys.executable, script]),
            **{name: _wall_s([*command, script]) for name, command in _launchers(1).items()},
        }
        samples = interleave(measures, rounds=3 if quick else 9)
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
    """Measure a launch of two processes beside torchrun's."""
    with tempfile.TemporaryDirectory() as folder:
        script = _script(folder)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        measures = {
            BASELINE: _wall_s([*torchrun, script]),
            CONTROL: _wall_s([*torchrun, script]),
            **{name: _wall_s([*command, script]) for name, command in _launchers(2).items()},
        }
        samples = interleave(measures, rounds=3 if quick else 7)
    compared = ratios(samples)
    return Row(
        what="`accel launch script.py`, 2 processes: wall time / torchrun",
        value=compared["accel"].median,
        limit=TWO_PROCESSES_LIMIT,
        peers={name: compared[name].median for name in ("accelerate",) if name in compared},
        noise=compared[CONTROL],
        base=f"{spread(samples[BASELINE]).median:.2f} s",
    )


def _script(folder: str) -> str:
    script = Path(folder) / "script.py"
    script.write_text("import torch\n")
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
