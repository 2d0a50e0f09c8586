"""Warnings in a run of several processes: once, at the line of the script that they are about."""

from __future__ import annotations

import pytest

# Torch starts in every process, and the machine may be busy.
pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import torch
from torch.utils.data import DataLoader
from accel import Accelerator, DistributedType
from accel.utils import ProjectConfiguration

accelerator = Accelerator(
    project_dir="a", project_config=ProjectConfiguration(project_dir="b")
)
kind = DistributedType("tpu")
loader = accelerator.prepare(DataLoader(torch.ones(3, 1), batch_size=2))
for batch in loader:
    accelerator.gather_for_metrics(torch.zeros(7))
"""
LINES = {
    7: "Accelerator ignores project_dir='a'",
    10: "'tpu' is an old spelling",
    13: "gather_for_metrics got 14 rows",
}


def test_each_warning_comes_once_at_its_line(launched, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = launched(script, launch_args=["--cpu"])

    assert run.returncode == 0, run.stderr
    for line, text in LINES.items():
        (told,) = [said for said in run.stderr.splitlines() if text in said]
        assert told.startswith(f"{script}:{line}: "), told
    assert run.stderr.count("Warning: ") == len(LINES), run.stderr
