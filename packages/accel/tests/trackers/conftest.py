"""Runs with the real library of a tracker, each in its own process and folder, without network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel.trackers.registry import TRACKERS
from accel_state.imports.packages import is_package_available

NO_SKIPS = "TRACKERS_NO_SKIPS"  # set by the hatch environment that has all libraries
SCRIPT = Path(__file__).with_name("offline_run.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Fail a test that would be skipped where all libraries must be there."""
    return _without_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Fail a file that would be skipped where all libraries must be there."""
    return _without_skip((yield))


def _without_skip(report):
    if report.skipped and os.environ.get(NO_SKIPS) == "1":
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{NO_SKIPS}=1, and it would be skipped: {reason}"
    return report


def python(folder, *command, **environment):
    """Run Python in `folder`, which is its home too; return what it printed as RESULT."""
    kept = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV") if key in os.environ}
    places = {"HOME": str(folder), "PYTHONPATH": str(SCRIPT.parent)}
    run = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**kept, **places, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.rpartition("RESULT ")[2].splitlines()[0])


@pytest.fixture
def run_offline(tmp_path):
    """Log everything of `offline_run.py` to a tracker; skip where its library is missing."""

    def run(name, options=None, **environment):
        library = TRACKERS[name].library
        if not is_package_available(library):
            pytest.skip(f"{library} is not installed; `hatch run trackers:test` has it")
        return python(tmp_path, SCRIPT, name, json.dumps(options or {}), **environment)

    return run


@pytest.fixture
def read_back(tmp_path):
    """Run a script with a library, which the tests do not import, and return what it printed as RESULT."""
    return lambda script: python(tmp_path, "-c", script)
