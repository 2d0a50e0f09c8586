"""What the plugin does before the first test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
TEST = f"""
import os, pytest

SEEN = [os.environ.get(name) for name in {HIDING}]

def test_it():
    assert SEEN == ["", "-1", "127"]

@pytest.mark.gpu
def test_on_a_gpu():
    assert SEEN == [None, None, None]
"""
# A file that is there on every machine stands for that of a driver.
PROGRAM = """
import sys, accel_pytest, pytest
accel_pytest._GPU_DRIVERS = ("/dev/null",)
sys.exit(pytest.main(["-p", "accel_pytest", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("marks", ["not gpu", "gpu"])
def test_devices_are_hidden_from_all_but_gpu_tests(tmp_path: Path, marks: str) -> None:
    (tmp_path / "test_hidden.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: on a GPU\n")
    environment = {name: text for name, text in os.environ.items() if name not in HIDING}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, "-m", marks],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "1 passed, 1 deselected" in run.stdout
