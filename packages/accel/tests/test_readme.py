"""The example of the package's README."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)[1]


def run_example():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(EXAMPLE, "README.md", "exec"), {})
    return printed.getvalue()


@pytest.mark.parametrize("processes", [1, 2])
def test_the_example_runs(world, processes):
    first, *others = world.run(run_example, size=processes)

    assert first == f"{processes} process(es), 90 samples\n"
    assert set(others) <= {""}
