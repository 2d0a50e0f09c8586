"""`hatch run trackers:test` fails where a library is missing, or does not import for want of another one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_one(): pytest.importorskip("no_such_library")
def test_two(): pytest.importorskip("broken")
"""


@pytest.mark.parametrize("variable", ["1", ""])
def test_a_skip_is_a_failure_where_all_libraries_must_be_there(tmp_path, variable):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "broken.py").write_text("import no_such_library")
    (tmp_path / "test_inside.py").write_text(TESTS)
    (tmp_path / "test_whole.py").write_text("import pytest\npytest.importorskip('no_such_library')\n")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {**os.environ, "TRACKERS_NO_SKIPS": variable, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [*command, "-rN", "--continue-on-collection-errors", "-p", "no:cacheprovider"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )

    summary = run.stdout.splitlines()[-1]
    if variable:
        assert run.returncode == 1
        assert "2 failed, 1 error" in summary
        assert run.stdout.count("TRACKERS_NO_SKIPS=1, and it would be skipped: ") == 3
    else:
        assert "3 skipped" in summary
