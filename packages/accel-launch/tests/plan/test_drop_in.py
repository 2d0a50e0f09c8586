"""`--drop_in` without the package that it needs; with it, see the tests of accel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_an_error_names_the_package(tmp_path: Path) -> None:
    # Another project of that name, which may be installed, hides accel where that is.
    (tmp_path / "accel").mkdir()
    (tmp_path / "accel/__init__.py").write_text("")
    (tmp_path / "train.py").write_text("")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, "-m", "accel_launch", "launch", "--drop-in", "--cpu", str(tmp_path / "train.py")],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )

    assert run.returncode == 2
    assert run.stderr.startswith("accel launch: error: --drop_in needs the package accel, which ")
    assert "pip install" in run.stderr
