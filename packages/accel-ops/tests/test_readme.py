"""The examples of the README."""

import torch.distributed as dist

from accel_world import readme

GATHER, ALONE = readme.examples(__file__)


def gathered():
    names = readme.run(GATHER)
    dist.destroy_process_group()
    return names["everyone"]["labels"].tolist(), names["mean"].item()


def test_the_first_example_runs_on_two_processes(world):
    assert readme.num_lines(GATHER) <= readme.MOST_LINES
    assert world.run(gathered, init=False) == [([0, 0, 1, 1], 0.5)] * 2


def test_the_second_example_runs_alone(fresh_state):
    names = readme.run(ALONE)
    assert names["same"] is not None
    assert names["same"].shape == (3,)
