"""Processes of torch_xla. There is none for the torch of the tests, so a module of its name stands for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]
STAND_IN = """
import multiprocessing


def spawn(function, nprocs):
    context = multiprocessing.get_context("spawn")  # the function has to survive pickling
    processes = [context.Process(target=function, args=(index,)) for index in range(nprocs or 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
"""
SCRIPT = """
import pathlib, os, sys

def main():
    pathlib.Path(f"ran{os.getpid()}").write_text(" ".join([__name__, *sys.argv]))

if __name__ == "__main__":
    raise SystemExit("each process imports the script")
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "lib/torch_xla/distributed"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "xla_multiprocessing.py").write_text(STAND_IN)
    return {"PYTHONPATH": f"{tmp_path / 'lib'}:{os.environ.get('PYTHONPATH', '')}"}


def test_every_process_runs_the_function(start: Start, stand_in: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = start("launch", "--tpu", "script.py", "--lr", "1", env=stand_in)
    code, _, error = run.finish()

    assert code == 0, error
    assert [path.read_text() for path in run.folder.glob("ran*")] == ["script script.py --lr 1"] * 2


@pytest.mark.parametrize(("processes", "started"), [("1", 1), ("2", 2)])
def test_torch_xla_starts_the_processes(
    start: Start, stand_in: dict[str, str], processes: str, started: int
) -> None:
    run = start("launch", "--tpu", "--num_processes", processes, script=SCRIPT, env=stand_in)

    assert run.finish()[0] == 0
    assert len(list(run.folder.glob("ran*"))) == started


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ((), set()),
        (("--mixed_precision", "bf16"), {"XLA_USE_BF16=1", "ACCELERATE_DOWNCAST_BF16=false"}),
        (
            ("--mixed_precision", "bf16", "--downcast_bf16", "--debug"),
            {"XLA_DOWNCAST_BF16=1", "ACCELERATE_DOWNCAST_BF16=true", "PT_XLA_DEBUG=1"},
        ),
    ],
)
def test_torch_xla_is_configured(start: Start, flags: tuple[str, ...], variables: set[str]) -> None:
    out = start("launch", "--tpu", *flags, "--dry_run", script="pass\n").finish()[1]
    shown = {line.removeprefix("export ") for line in out.splitlines() if "XLA" in line or "DOWNCAST" in line}

    assert shown == variables


def test_what_torch_xla_cannot_do_is_rejected(start: Start) -> None:
    code, _, error = start("launch", "--tpu", "--max_restarts", "1", script="pass\n").finish()

    assert code == 2
    assert "--tpu does not support max_restarts=1; leave that out." in error


def test_a_function_that_is_not_there_is_named(start: Start, stand_in: dict[str, str]) -> None:
    run = start("launch", "--tpu", "--main_training_function", "mian", script=SCRIPT, env=stand_in)
    code, _, error = run.finish()

    assert code == 2
    assert "has no function 'mian'. Did you mean main?" in error


def test_a_missing_torch_xla_is_named(start: Start) -> None:
    code, _, error = start("launch", "--tpu", script=SCRIPT).finish()

    assert code == 2
    assert "--tpu needs torch_xla" in error
    assert "pip install ./packages/accel-state './packages/accel-launch[tpu]'" in error
