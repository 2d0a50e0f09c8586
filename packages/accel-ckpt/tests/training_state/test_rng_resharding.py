from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from accel_ckpt.training_state.rng import set_rng_state
from accel_ckpt.training_state.rng_resharding import fingerprints, random_states_for
from accel_state.process.state import current_process


def state(seed: int, shared: int) -> dict[str, Any]:
    """What a rank saves: two generators that only it has, and torch's, which is in step on all."""
    return {
        "random_state": random.Random(seed).getstate(),
        "numpy_random_seed": np.random.RandomState(seed).get_state(),
        "torch_manual_seed": torch.Generator().manual_seed(shared).get_state(),
    }


def draws(states: dict[str, Any]) -> tuple[float, ...]:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_rng_state(states, current_process())
    drawn = random.random(), float(np.random.rand()), torch.rand(()).item()
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])
    return drawn


def test_every_new_rank_gets_generators_of_its_own_unless_they_were_in_step() -> None:
    saved = [state(seed, 9) for seed in (1, 2)]
    known = [fingerprints(states) for states in saved]

    def derived(rank: int) -> tuple[float, ...]:
        return draws(random_states_for(rank, saved[rank % 2], known, current_process()))

    found = [derived(rank) for rank in range(7)]

    assert found[:2] == [draws(states) for states in saved]
    python, numpy, in_step = zip(*found, strict=True)
    # Ranks 2, 4 and 6 come from one saved state, 3 and 5 from the other.
    assert len(set(python)) == len(set(numpy)) == 7
    assert len(set(in_step)) == 1
    assert found == [derived(rank) for rank in range(7)]
