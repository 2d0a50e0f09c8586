"""What a program with the switch on starts runs on accel too; see children.py, whose checks run there."""

from __future__ import annotations

import os
from pathlib import Path

from accel_launch.plan.drop_in import drop_in_environment

WHO = "import accelerate; print(accelerate.__name__)"


def test_children_of_a_program(python):
    run = python("-W", "error", "-m", "accel.drop_in", Path(__file__).parent / "children.py")

    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "7 of 7 passed\n"


def test_children_of_a_program_that_activates(python):
    chosen = ["this_process", "processes_of_multiprocessing", "workers_of_loaders"]
    run = python("-W", "error", Path(__file__).parent / "children.py", "activate", *chosen)

    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "3 of 3 passed\n"


def test_workers_of_the_launcher(launched, other):
    script = "import os\nimport accelerate\nprint(os.environ['RANK'], accelerate.__name__)"
    run = launched(script, launch_args=["--drop-in", "--cpu"], env={"PYTHONPATH": str(other)})

    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["0 accel", "1 accel"]


def test_the_environment_s_own_sitecustomize_runs(python, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("RUN = True\nimport accelerate\nNAME = accelerate.__name__")
    code = "import sys, sitecustomize as own; print(own.RUN, own.NAME, own.__file__, *sys.path)"
    run = python("-m", "accel.drop_in", "-c", code, first=tmp_path)

    words = run.stdout.split()
    assert words[:3] == ["True", "accel", str(tmp_path / "sitecustomize.py")], run.stderr
    assert not any(place.endswith("drop_in/startup") for place in words)


def test_a_python_with_another_project_named_accel_runs_as_ever(python, tmp_path):
    (tmp_path / "accel").mkdir()
    (tmp_path / "accel/__init__.py").write_text("")
    startup = drop_in_environment(os.environ)["PYTHONPATH"].split(os.pathsep)[0]
    code = f"import os, sys; sys.path.insert(0, {str(tmp_path)!r}); import sitecustomize; {WHO}"
    run = python("-c", code, first=Path(startup))

    assert (run.stdout, run.stderr) == ("accelerate\n", "")


def test_the_environment_is_the_same_when_made_again():
    once = drop_in_environment({"PATH": "/bin", "PYTHONPATH": "/a::/b", "OTHER": "x"})

    assert drop_in_environment(once) == once
    assert once["PYTHONPATH"].endswith(f"drop_in/startup{os.pathsep}/a::/b")
    assert once["PATH"].endswith(f"drop_in/bin{os.pathsep}/bin")
    assert once["OTHER"] == "x"
