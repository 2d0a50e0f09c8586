import random
import timeit

import numpy
import pytest
import torch

from accel_data.draws import Watch
from accel_data.order import IsolatedRNG


def isolated():
    with IsolatedRNG(1):
        pass


MOVES = {
    "torch": lambda: torch.rand(1),
    "torch, a whole round": lambda: torch.rand(624),
    "random": random.random,
    "random, a whole round": lambda: random.randbytes(4 * 624),
    "gauss": lambda: random.gauss(0, 1),
    "numpy": numpy.random.rand,
    "numpy, a whole round": lambda: numpy.random.bytes(4 * 624),
    "isolated": isolated,
}


@pytest.mark.parametrize("kind", MOVES)
def test_each_draw_is_seen_once(kind):
    watch = Watch()
    for _ in range(4):
        torch.Generator().manual_seed(1)
        random.Random(1).random()
        assert not watch.moved()
        MOVES[kind]()
        assert watch.moved()


def test_looking_takes_no_time_and_draws_nothing():
    before = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    watch = Watch()
    assert min(timeit.repeat(watch.moved, number=500, repeat=20)) / 500 < 20e-6  # 1 to 2 alone
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(numpy.random.get_state()))
