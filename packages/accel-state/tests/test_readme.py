"""The examples of the README."""

import contextlib
import io

import pytest

from accel_world import readme

FIRST, ENVIRONMENT = readme.examples(__file__)


def printed():
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        readme.run(FIRST)
    return told.getvalue()


@pytest.mark.parametrize("size", [1, 2])
def test_the_first_example_splits_inputs(world, size):
    assert readme.num_lines(FIRST) <= readme.MOST_LINES
    parts = {1: ["['a cat', 'a dog', 'a bird']"], 2: ["['a cat', 'a dog']", "['a bird']"]}[size]
    found = world.run(printed, size=size)
    assert found == [f"rank {rank} has {part}\n" for rank, part in enumerate(parts)]


def test_the_example_of_the_environment_runs(capsys):
    names = readme.run(ENVIRONMENT)
    assert names["child"] == {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert "ACCELERATE_MIXED_PRECISION" in capsys.readouterr().out
