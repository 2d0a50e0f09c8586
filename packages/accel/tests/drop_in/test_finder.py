"""accelerate is a view of accel in a program with the switch on; see views.py, whose checks run there."""

from __future__ import annotations

import pickle
from pathlib import Path

from accel import ProfileKwargs


def test_a_program_with_the_switch_on(python, tmp_path):
    (tmp_path / "given.pkl").write_bytes(pickle.dumps(ProfileKwargs(with_flops=True)))
    run = python("-W", "error", "-m", "accel.drop_in", Path(__file__).parent / "views.py", tmp_path)

    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "18 of 18 passed\n"
    made = (tmp_path / "made.pkl").read_bytes()
    assert b"accelerate" not in made
    assert pickle.loads(made) == ProfileKwargs(with_stack=True)
