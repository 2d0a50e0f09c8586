"""transformers on accel in the name of accelerate; `hatch run clients:test` does so with more libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from repo_checks.documented import client_entries

ROOT = Path(__file__).parents[1]


def test_every_name_that_clients_import_is_there():
    entries = list(client_entries((ROOT / "tools/reference/client-imports.txt").read_text()))
    missing = []
    for entry in entries:
        found = import_module(entry.module)
        for attribute in entry.attributes:
            found = getattr(found, attribute, None)
        if found is None:
            missing.append(entry.name)

    assert len(entries) > 80
    assert missing == []


@pytest.mark.timeout(300)
def test_transformers_on_accel():
    switched = [sys.executable, "-m", "accel.drop_in", "-m", "pytest"]
    options = ["-p", "no:cacheprovider", "-n", "0", "-q"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    run = subprocess.run(
        [*switched, *options, "tests-integration/clients/test_transformers.py"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    assert run.returncode == 0, run.stdout
    assert "passed" in run.stdout
    assert "skipped" not in run.stdout
