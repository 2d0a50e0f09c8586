"""`python -m accel.drop_in`: the program takes the place of the process."""

from __future__ import annotations

import os

WORDS = """
import sys
import accelerate

print(__name__, accelerate.__name__, sys.flags.optimize, sys.argv, sys.path[0])
"""


def test_a_script_with_its_arguments_and_python_s_options(python, tmp_path):
    (tmp_path / "script.py").write_text(WORDS)
    for options in (["-O", "-m", "accel.drop_in"], ["-Om", "accel.drop_in"], ["-O", "-maccel.drop_in"]):
        run = python(*options, tmp_path / "script.py", "-m", "--flag", "accel.drop_in")

        arguments = [str(tmp_path / "script.py"), "-m", "--flag", "accel.drop_in"]
        assert run.stdout == f"__main__ accel 1 {arguments} {tmp_path}\n", run.stderr


def test_a_module(python, tmp_path):
    (tmp_path / "module_of_mine.py").write_text(WORDS)
    folder = os.getcwd()
    run = python("-m", "accel.drop_in", "-m", "module_of_mine", "x", first=tmp_path)

    assert run.stdout == f"__main__ accel 0 ['{tmp_path}/module_of_mine.py', 'x'] {folder}\n", run.stderr


def test_errors(python):
    assert "usage: python -m accel.drop_in" in python("-m", "accel.drop_in").stdout
    assert python("-m", "accel.drop_in").returncode == 2
    assert python("-m", "accel.drop_in", "--help").returncode == 0
    run = python("-E", "-m", "accel.drop_in", "-c", "")
    assert (run.returncode, run.stdout) == (1, "")
    assert "options -E, -I and -S keep the switch off" in run.stderr
