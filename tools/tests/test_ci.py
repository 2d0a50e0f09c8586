"""`.ci/run` when it is stopped, the order of its steps by calls of hatch, and what it says of each."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accel_world import marked

RUN = Path(__file__).parents[2] / ".ci/run"


HATCH = """#!/bin/bash
if [ "$1" = env ]; then
  sleep 0.1
  [ "$3" != "$MISSING" ] || { echo "no $3"; exit 1; }
  echo "made $3" >> "$CALLS"
else
  echo "run $2" >> "$CALLS"
  echo "output of $2"
  if [ "$2" = "$STOPPED" ]; then
    echo here > started
    sleep 60
  fi
  [ "$2" != "$FAILING" ]
fi
"""
PYTHON = """#!/bin/bash
mkdir -p "$3/bin"
cp "$TOOLS/hatch" "$3/bin/hatch"
ln -s /bin/true "$3/bin/pip"
"""
NEEDED = {
    "docs:build": ("docs",),
    "types:check": ("types",),
    "names": ("default",),
    "interface": ("default",),
    "test": ("default",),
    "clients:test": ("clients", "accelerate"),
    "alone:test": ("alone",),
    "matrix.py3.11-2.10:test": ("matrix.py3.11-2.10",),
    "matrix.py3.11-newest:test": ("matrix.py3.11-newest",),
}
ALONE = {"lint:check", "release:check", "wheels:test"}  # these make their environments themselves


def _start(folder: Path, environment: dict[str, str], **options: Any) -> subprocess.Popen[str]:
    for name in (".ci", "bin", "work"):
        (folder / name).mkdir()
    shutil.copy(RUN, folder / ".ci/run")
    for name, text in {"hatch": HATCH, "python3": PYTHON}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    paths = {"TMPDIR": f"{folder}/work", "TOOLS": f"{folder}/bin", "CALLS": f"{folder}/calls"}
    return subprocess.Popen(
        ["bash", str(folder / ".ci/run")],
        env={"PATH": f"{folder}/bin:{os.environ['PATH']}"} | paths | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def _run(folder: Path, **environment: str) -> tuple[int, str, list[str]]:
    """Return the exit code, what is printed, and the calls of hatch in their order."""
    run = _start(folder, environment)
    out, _ = run.communicate(timeout=60)
    assert not any((folder / "work").iterdir())
    return run.returncode, out, (folder / "calls").read_text().splitlines()


# The second and the last run at the same time as others, and the third while another one does.
@pytest.mark.parametrize("step", ["lint:check", "docs:build", "types:check", "alone:test"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_a_failure_and_ends_everything(tmp_path: Path, step: str, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "started")
    mark = str(tmp_path)
    run = _start(
        tmp_path,
        {"STOPPED": step, marked.MARK: mark},
        # Tests may run under nohup or in the background, where these signals are ignored.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    (tmp_path / "started").read_text()
    run.send_signal(number)
    out, _ = run.communicate(timeout=20)

    assert run.returncode == 128 + number
    assert out.splitlines()[-1] == "ci: FAILED"
    assert marked.end(mark, patience_s=2) == []
    assert not any((tmp_path / "work").iterdir())


def test_each_step_runs_once_after_its_environments_are_made(tmp_path: Path) -> None:
    code, out, calls = _run(tmp_path)

    assert (code, out.splitlines()[-1]) == (0, "ci: ok")
    assert sorted(call for call in calls if call.startswith("run ")) == sorted(
        f"run {name}" for name in NEEDED.keys() | ALONE
    )
    for name, environments in NEEDED.items():
        for environment in environments:
            assert calls.index(f"made {environment}") < calls.index(f"run {name}")


@pytest.mark.parametrize("missing", ["types", "accelerate", "matrix.py3.11-newest"])
def test_an_environment_that_cannot_be_made_is_a_failure(tmp_path: Path, missing: str) -> None:
    code, out, calls = _run(tmp_path, MISSING=missing)

    assert (code, out.splitlines()[-1]) == (1, "ci: FAILED")
    assert f"no {missing}" in out.splitlines()
    assert not any(f"run {name}" in calls for name, needed in NEEDED.items() if missing in needed)


@pytest.mark.parametrize("step", sorted(NEEDED.keys() | ALONE))
def test_a_step_that_fails_is_a_failure(tmp_path: Path, step: str) -> None:
    code, out, calls = _run(tmp_path, FAILING=step)

    assert (code, out.splitlines()[-1]) == (1, "ci: FAILED")
    assert f"run {step}" in calls
    last = "matrix.py3.11-newest:test"
    assert (step in (last, "alone:test")) == (f"run {last}" in calls)
    # The output of the steps beside it may come between.
    output = rf"\n== hatch run {step}\n(.*\n)?output of {step}\n(.*\n)?== hatch run {step}: FAILED, \d+ s\n"
    assert re.search(output, out, re.DOTALL)
    _, _, summary = out.partition("\n== summary")
    assert re.findall(r"== hatch run (\S+): FAILED, \d+ s\n", summary) == [step]


def test_the_summary_has_a_line_for_each_step(tmp_path: Path) -> None:
    _, out, _ = _run(tmp_path)

    _, _, summary = out.partition("\n== summary")
    found = re.findall(r"== hatch run (\S+): ok, \d+ s\n", summary)
    assert sorted(found) == sorted(NEEDED.keys() | ALONE)
