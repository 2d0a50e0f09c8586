"""`accel verify` says what it could not verify; runs that it can are on the page on observability."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)


def verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "accel_launch", "verify", "--cpu", *arguments],
        cwd=folder,
        env={**os.environ, "HF_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=280,
    )


WITHOUT_STEPS = """
import accel, torch
class Own(torch.optim.Optimizer):
    pass
accelerator = accel.Accelerator()
accelerator.prepare(Own([torch.ones(1, requires_grad=True)], {}))
"""
FAILS = {
    "raise ValueError('planted')": ("failed on 3 processes with exit code 1", "ValueError: planted"),
    WITHOUT_STEPS: (
        "ended on 3 processes without a step that is recorded. Prepared optimizers: Own.",
        "LOMO",
    ),
    "print('no training here')": ("made no Accelerator on 3 processes", ""),
}


@pytest.mark.parametrize("program", FAILS, ids=["fails", "makes no step", "makes no Accelerator"])
def test_a_program_that_cannot_be_verified_exits_with_2(tmp_path: Path, program: str) -> None:
    (tmp_path / "train.py").write_text(program)
    ran = verify(tmp_path, "--num_processes", "3", "train.py")

    assert ran.returncode == 2
    for text in FAILS[program]:
        assert text in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "No script was passed"),
        (["--num_processes", "1", "x.py"], "give 2 or more"),
        (["--steps", "0", "x.py"], "give 1 or more"),
        (["--json", "none/found.json", "x.py"], "--json is none/found.json: its folder does not exist"),
        (["--num_machines", "2", "x.py"], "on one machine"),
    ],
)
def test_flags_that_make_no_sense_are_errors(tmp_path: Path, arguments: list[str], told: str) -> None:
    ran = verify(tmp_path, *arguments)

    assert ran.returncode == 2
    assert told in ran.stderr
