"""Launched runs: results, time limits, orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_world import marked
from accel_world.launched import LaunchFailure

REPORT = """
import os, sys
rank = os.environ.get("RANK", "alone")
# In one call: where output is not buffered, print writes each of its arguments by itself.
sys.stdout.write(f"{rank} {os.environ.get('WORLD_SIZE')} {sys.argv[1:]} {os.environ.get('EXTRA')}\\n")
"""

ORPHAN = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
"""

SLEEPER = """
import os, time
def wait_for_ever():
    print("rank", os.environ["RANK"], "waits", flush=True)
    time.sleep(60)
wait_for_ever()
"""


def test_a_script_from_source(launched):
    run = launched(REPORT, "--flag", launcher="python", env={"EXTRA": "x"})
    assert run.returncode == 0
    assert run.stdout == "alone None ['--flag'] x\n"
    assert run.stderr == ""
    assert 0 < run.seconds < 60


def test_a_script_from_a_path(launched, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(REPORT)
    assert launched(path, launcher="python").stdout == "alone None [] None\n"


@pytest.mark.parametrize("launcher", ["accel", "torchrun"])
def test_a_launcher_starts_every_rank(launched, launcher):
    run = launched(REPORT, "--flag", launcher=launcher, env={"EXTRA": "x"})
    assert run.returncode == 0
    assert sorted(run.stdout.splitlines()) == ["0 2 ['--flag'] x", "1 2 ['--flag'] x"]


def test_a_failing_script_returns_its_code(launched):
    run = launched("import sys\nsys.exit(7)", launcher="python")
    assert run.returncode == 7


def test_an_orphan_is_named_and_killed(launched, monkeypatch):
    monkeypatch.setattr("accel_world.launched.ORPHAN_S", 0.5)
    with pytest.raises(LaunchFailure, match=r"left running:\nprocess \d+: .*time\.sleep\(60\)"):
        launched(ORPHAN, launcher="python")


def test_a_run_past_its_limit_is_killed_with_the_stacks_of_every_rank(launched, capsys, tmp_path):
    begin = time.monotonic()
    temporary = {"TMPDIR": str(tmp_path)}  # a launcher that is killed leaves its folder there
    with pytest.raises(LaunchFailure, match=r"did not end within 6 s") as info:
        # The workers, which import nothing, start in tenths of a second.
        launched(SLEEPER, timeout_s=6, env=temporary)
    assert str(info.value).count("in wait_for_ever") == 2
    assert sorted(capsys.readouterr().out.splitlines()) == ["rank 0 waits", "rank 1 waits"]
    assert time.monotonic() - begin < 60


KILLED = """
import os, signal, threading
from pathlib import Path
from accel_world.guard import Guard
from accel_world.launched import launch

def kill_when_it_runs():
    runs = Path("run/work/runs")
    while not (runs.exists() and runs.read_text()):
        pass
    os.kill(os.getpid(), signal.SIGKILL)

Path("run").mkdir()
threading.Thread(target=kill_when_it_runs).start()
launch(Guard(), Path("run").resolve(), "from pathlib import Path\\nimport os, time\\n"
    "Path('runs').write_text(os.environ['ACCEL_TEST_RUN'])\\ntime.sleep(60)", num_processes=1)
"""


def test_a_run_does_not_outlive_a_killed_pytest(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(marked.__file__).parents[1])}
    command = [sys.executable, "-c", KILLED]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, check=False
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    mark = (tmp_path / "run" / "work" / "runs").read_text()
    assert mark
    until = time.monotonic() + 10
    while marked.find(mark) and time.monotonic() < until:
        time.sleep(0.02)
    assert marked.find(mark) == []


def test_an_unknown_launcher(launched):
    with pytest.raises(ValueError, match="one of accel, accelerate, python, torchrun, got 'mpirun'"):
        launched(REPORT, launcher="mpirun")


def test_processes_are_found_by_their_mark():
    assert marked.find("no such run") == []
