"""CPU time of imports, and of commands that need no torch."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from .commands import console_script, run
from .row import Row
from .timing import BASELINE, CONTROL, interleave, ratios, spread

__all__ = ["dry_run_row", "help_row", "import_rows"]

LIMIT = 1.05
COMMAND_LIMIT_S = 0.2


def import_rows(*, quick: bool = False) -> list[Row]:
    """Measure only the import statements, in processes that have imported nothing else."""
    measures = {
        BASELINE: _import("import torch"),
        CONTROL: _import("import torch"),
        "accel": _import("import accel"),
        "Accelerator": _import("from accel import Accelerator"),
    }
    if importlib.util.find_spec("accelerate"):
        measures["accelerate"] = _import("from accelerate import Accelerator")
    if importlib.util.find_spec("lightning_fabric"):
        measures["lightning-fabric"] = _import("from lightning_fabric import Fabric")
    samples = interleave(measures, rounds=3 if quick else 7)
    compared = ratios(samples)
    peers = {name: compared[name].median for name in ("accelerate", "lightning-fabric") if name in compared}
    base = f"{spread(samples[BASELINE]).median:.2f} s"
    noise = compared[CONTROL]
    return [
        Row(
            "`import accel`: CPU time / `import torch`",
            compared["accel"].median,
            LIMIT,
            noise=noise,
            base=base,
        ),
        Row(
            "`from accel import Accelerator`: CPU time / `import torch`",
            compared["Accelerator"].median,
            LIMIT,
            peers=peers,
            noise=noise,
            base=base,
        ),
    ]


def _import(statement: str) -> Callable[[], float]:
    # Without the garbage collector, as all measures here (see `interleave`): a collection of torch's 170,000
    # objects takes 50 ms, and falls into whatever comes after torch, be it accel or the user's next import.
    code = (
        "import gc, time; gc.disable(); start = time.process_time(); "
        f"{statement}; print(time.process_time() - start)"
    )
    return lambda: float(run([sys.executable, "-c", code]).stdout)


def help_row(*, quick: bool = False) -> Row:
    """Measure the CPU time of the command's help, and see whether that imported torch."""
    return _command_row("`accel --help`: CPU seconds", ("accel", "accelerate"), ["--help"], quick)


def dry_run_row(*, quick: bool = False) -> Row:
    """Measure the CPU time of planning a launch of two processes, which accelerate has no command for."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.touch()
        arguments = ["launch", "--dry_run", "--cpu", "--num_processes", "2", str(script)]
        return _command_row(
            "`accel launch --dry_run`, 2 processes: CPU seconds", ("accel",), arguments, quick
        )


def _command_row(what: str, names: tuple[str, ...], arguments: list[str], quick: bool) -> Row:
    scripts = {name: console_script(name) for name in names}
    commands = {name: [sys.executable, path, *arguments] for name, path in scripts.items() if path}
    measures = {name: _cpu_s(command) for name, command in commands.items()}
    samples = interleave(measures, rounds=3 if quick else 7)
    cpu_s = {name: spread(values) for name, values in samples.items()}
    return Row(
        what=what,
        value=cpu_s["accel"].median,
        limit=COMMAND_LIMIT_S,
        unit="s",
        condition=("torch not imported", not _imports_torch(commands["accel"])),
        peers={name: cpu_s[name].median for name in ("accelerate",) if name in cpu_s},
    )


def _cpu_s(command: list[str]) -> Callable[[], float]:
    return lambda: run(command).cpu_s


def _imports_torch(command: list[str]) -> bool:
    """Tell from the interpreter's own list of imports, not from how long it took."""
    report = run([command[0], "-X", "importtime", *command[1:]]).stderr
    imported = {line.rpartition("|")[2].strip() for line in report.splitlines() if "|" in line}
    if "site" not in imported:  # every start of the interpreter imports it
        raise RuntimeError(f"the list of imports of {' '.join(command)} is not as expected:\n{report}")
    return "torch" in imported
