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


def spawn(function):
    context = multiprocessing.get_context("spawn")  # the function has to survive pickling
    processes = [context.Process(target=function, args=(index,)) for index in range(2)]
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


def test_a_function_that_is_not_there_is_named(start: Start, stand_in: dict[str, str]) -> None:
    run = start("launch", "--tpu", "--main_training_function", "mian", script=SCRIPT, env=stand_in)
    code, _, error = run.finish()

    assert code == 2
    assert "has no function 'mian'. Did you mean main?" in error


def test_a_missing_torch_xla_is_named(start: Start) -> None:
    code, _, error = start("launch", "--tpu", script=SCRIPT).finish()

    assert code == 2
    assert "--tpu needs torch_xla" in error
    assert "pip install 'accel-launch[tpu]'" in error
