from __future__ import annotations

import random

import numpy
import pytest
import torch

from accel_ops.rng import set_seed, synchronize_rng_state, synchronize_rng_states
from accel_state.process.state import current_process


def numbers() -> list:
    return [random.random(), float(numpy.random.rand()), torch.rand(1).item()]


def test_one_seed_fixes_all_generators():
    set_seed(5)
    first = numbers()
    set_seed(5)

    assert numbers() == first
    set_seed(6)
    assert all(a != b for a, b in zip(numbers(), first, strict=True))
    set_seed(2**40)  # more than NumPy's 32 bits
    set_seed(numpy.int64(5))
    assert numbers() == first


@pytest.mark.parametrize("seed", [1.5, "1", None, True])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(TypeError, match=r"takes an integer, but got"):
        set_seed(seed)


def test_deterministic_algorithms_on_request():
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def specific(device_specific: bool) -> list:
    set_seed(3, device_specific)
    return numbers()


def test_device_specific_seeds_differ_between_processes(world):
    a, b = world.run(specific, True)
    assert all(x != y for x, y in zip(a, b, strict=True))
    set_seed(4)
    assert numbers() == b
    a, b = world.run(specific, False)
    assert a == b


def synchronized() -> list:
    rank = current_process().rank
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(10 + rank)
    drawn = torch.rand(rank + 1, generator=generator)
    synchronize_rng_states(["torch", "generator"], generator)
    return [torch.rand(1).item(), torch.rand(1, generator=generator).item(), len(drawn)]


@pytest.mark.parametrize("size", [2, 3])
def test_states_of_process_0_reach_all(world, size):
    results = world.run(synchronized, size=size)

    assert len({tuple(result[:2]) for result in results}) == 1
    torch.manual_seed(0)
    assert results[0][0] == torch.rand(1).item()


def one_at_a_time() -> float:
    torch.manual_seed(current_process().rank)
    synchronize_rng_state(None)
    synchronize_rng_state("torch")
    return torch.rand(1).item()


def test_one_generator_alone(world):
    a, b = world.run(one_at_a_time)
    assert a == b


def test_wrong_types_are_named():
    with pytest.raises(ValueError, match="torchy"):
        synchronize_rng_states(["torchy"])
    with pytest.raises(ValueError, match=r"'generator' needs a torch\.Generator"):
        synchronize_rng_state("generator")
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="'cuda' is left out"):
            synchronize_rng_states(["torch", "cuda"])


def without_generator(missing: int) -> tuple[str, float]:
    rank = current_process().rank
    generator = None if rank == missing else torch.Generator().manual_seed(rank)
    message = ""
    try:
        synchronize_rng_states(["generator"], generator)
    except ValueError as error:
        message = str(error)
    drawn = -1.0 if generator is None else torch.rand(1, generator=generator).item()
    return message, drawn


@pytest.mark.parametrize("missing", [0, 1])
def test_a_process_without_the_generator_raises_and_does_not_hang(world, missing):
    results = world.run(without_generator, missing, size=3)

    raising = [rank for rank, (message, _) in enumerate(results) if "needs a torch.Generator" in message]
    assert raising == ([0, 1, 2] if missing == 0 else [1])
    if missing == 1:
        assert results[0][1] == results[2][1]


def test_an_unknown_type_is_named_with_the_allowed_ones():
    with pytest.raises(ValueError, match=r"torchy.*generator"):
        synchronize_rng_state("torchy")
