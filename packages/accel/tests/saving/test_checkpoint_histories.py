"""Whatever runs, loads, kills and limits there were: the newest commit is there, and is what is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("checkpoint_histories.py")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_newest_commit_is_always_there_and_is_what_is_loaded(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "60"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
