"""The example of the package's README."""

from __future__ import annotations

import pytest

from accel_world import readme

(EXAMPLE,) = readme.examples(__file__)


def trained() -> tuple[int, float]:
    names = readme.run(EXAMPLE)
    loss = names["model"](names["batch"]).square().mean().item()
    return names["accelerator"].num_processes, loss


@pytest.mark.parametrize("processes", [1, 2])
def test_the_example_trains(world, processes):
    assert readme.num_lines(EXAMPLE) <= readme.MOST_LINES
    for size, loss in world.run(trained, size=processes):
        assert size == processes
        assert loss < 0.01
