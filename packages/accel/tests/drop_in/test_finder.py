"""accelerate is a view of accel in a program with the switch on; see views.py, whose checks run there."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

from accel import ProfileKwargs
from accel.drop_in import finder


def test_a_program_with_the_switch_on(python, tmp_path):
    (tmp_path / "given.pkl").write_bytes(pickle.dumps(ProfileKwargs(with_flops=True)))
    run = python("-W", "error", "-m", "accel.drop_in", Path(__file__).parent / "views.py", tmp_path)

    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "23 of 23 passed\n"
    made = (tmp_path / "made.pkl").read_bytes()
    assert b"accelerate" not in made
    assert pickle.loads(made) == ProfileKwargs(with_stack=True)


def test_every_logger_of_accel_has_its_documented_module():
    made = set()
    for source in Path(__file__).parents[4].glob("packages/*/src"):
        for path in source.rglob("*.py"):
            found = re.search(
                r"^_logger = (?:logging\.getL|get_l)ogger\((.*)\)$", path.read_text(), re.MULTILINE
            )
            if found:
                module = ".".join(path.relative_to(source).with_suffix("").parts)
                made.add(module if found[1] == "__name__" else found[1].strip('"'))

    assert made == {name for names in finder._LOGGERS.values() for name in names}
