"""`.ci/run` when it is stopped in its first step, and the order of its steps by calls of hatch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci/run"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_a_failure(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(RUN, tmp_path / ".ci/run")
    os.mkfifo(tmp_path / "started")
    os.mkfifo(tmp_path / "go")
    first = tmp_path / "bin/python3"
    first.write_text(f"#!/bin/sh\necho here > {tmp_path}/started\nread line < {tmp_path}/go\n")
    first.chmod(0o755)
    run = subprocess.Popen(
        ["bash", str(tmp_path / ".ci/run")],
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        # Tests may run under nohup or in the background, where these signals are ignored.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    (tmp_path / "started").read_text()
    run.send_signal(number)
    (tmp_path / "go").write_text("end well\n")
    out, _ = run.communicate(timeout=60)

    assert run.returncode == 128 + number
    assert out.splitlines()[-1] == "ci: FAILED"


HATCH = """#!/bin/bash
if [ "$1" = env ]; then
  sleep 0.1
  [ "$3" != "$MISSING" ] || { echo "no $3"; exit 1; }
  echo "made $3" >> "$CALLS"
else
  echo "run $2" >> "$CALLS"
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
    "matrix.py3.11-2.6:test": ("matrix.py3.11-2.6",),
    "matrix.py3.11-newest:test": ("matrix.py3.11-newest",),
}
ALONE = {"lint:check", "release:check", "wheels:test"}  # these make their environments themselves


def _run(folder: Path, **environment: str) -> tuple[int, str, list[str]]:
    """Return the exit code, what is printed, and the calls of hatch in their order."""
    for name in (".ci", "bin", "work"):
        (folder / name).mkdir()
    shutil.copy(RUN, folder / ".ci/run")
    for name, text in {"hatch": HATCH, "python3": PYTHON}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    paths = {"TMPDIR": f"{folder}/work", "TOOLS": f"{folder}/bin", "CALLS": f"{folder}/calls"}
    run = subprocess.run(
        ["bash", str(folder / ".ci/run")],
        env={"PATH": f"{folder}/bin:{os.environ['PATH']}"} | paths | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert not any((folder / "work").iterdir())
    return run.returncode, run.stdout, (folder / "calls").read_text().splitlines()


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
    assert (step == "matrix.py3.11-newest:test") == ("run matrix.py3.11-newest:test" in calls)
