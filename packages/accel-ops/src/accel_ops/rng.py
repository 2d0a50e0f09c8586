"""Random number generators: seeding all of them, and synchronizing them between processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, SupportsIndex

import numpy
import torch

from accel_ops.collectives.objects import broadcast_object_list
from accel_state.devices.table import device_spec
from accel_state.enums import RNGType
from accel_state.logging.warning import warn
from accel_state.process.info import ProcessInfo
from accel_state.process.state import current_process

_seed_count = 0


def seed_count() -> int:
    """Return how often this process has called `set_seed`: what is counted since then starts again."""
    return _seed_count


def set_seed(
    seed: int,
    device_specific: bool = False,
    deterministic: bool = False,
    *,
    process: ProcessInfo | None = None,
) -> None:
    """Seed Python's, NumPy's and torch's generators, the last on every device.

    Args:
        seed: The seed.
        device_specific: Add the rank to it, so that each process draws other numbers.
        deterministic: Make torch use deterministic algorithms where there are any (slower), and raise
            where there are none.
        process: This process; the current one by default.

    Raises:
        TypeError: If the seed is not an integer.
    """
    if not isinstance(seed, SupportsIndex) or isinstance(seed, bool):
        raise TypeError(f"set_seed takes an integer, but got {seed!r}.")
    global _seed_count
    _seed_count += 1
    seed = index(seed)  # NumPy's integers, which seeds of sweeps often are, too
    if device_specific:
        seed += (process or current_process()).rank
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(seed)
    device = device_spec((process or current_process()).device)
    if device.rng_type == RNGType.XLA:  # torch.manual_seed reaches all others
        device.set_rng_state(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(
    rng_type: RNGType | str | None = None,
    generator: torch.Generator | None = None,
    *,
    process: ProcessInfo | None = None,
) -> None:
    """Set one generator of every process to the state of process 0's.

    Args:
        rng_type: "torch", "generator" or the name of a device; None for none.
        generator: The one that "generator" means.
        process: This process; the current one by default.

    Raises:
        ValueError: If the type is unknown, or "generator" comes without one.
    """
    synchronize_rng_states([] if rng_type is None else [rng_type], generator, process=process)


def synchronize_rng_states(
    rng_types: Sequence[RNGType | str],
    generator: torch.Generator | None = None,
    *,
    process: ProcessInfo | None = None,
) -> None:
    """Set generators of every process to the states of process 0's.

    A process with an error raises, but does not make the others hang.

    Args:
        rng_types: "torch", "generator" and names of devices. A device that is not here is left out with a
            warning.
        generator: The one that "generator" means.
        process: This process; the current one by default.

    Raises:
        ValueError: If a type is unknown, or "generator" comes without one; on every process, if that is so
            on process 0.
        RuntimeError: If the generators of process 0 could not be read.
    """
    process = process or current_process()
    states, setters, problem = _generators(rng_types, generator)
    if process.world_size > 1 and rng_types:
        # Also with a problem: otherwise the other ranks would deadlock.
        # One collective for all generators and the problem, so that no process can leave in between.
        states, problem_of_0 = broadcast_object_list([states, _sendable(problem)], process=process)
        # What process 0 does not have, or this one cannot set, stays as it is.
        for kind in setters.keys() & states.keys():
            setters[kind](states[kind])
        problem = problem or problem_of_0
    if problem is not None:
        raise problem


_State = Any  # a uint8 tensor; a number on XLA
_States = dict[RNGType, _State]
_Setters = dict[RNGType, Callable[[_State], Any]]


def _generators(
    rng_types: Sequence[RNGType | str], generator: torch.Generator | None
) -> tuple[_States, _Setters, Exception | None]:
    """Return the state of each generator, its setter, and the problem with the choice, if any."""
    states: _States = {}
    setters: _Setters = {}
    try:
        for kind in map(RNGType, rng_types):
            pair = _generator(kind, generator)
            if pair is not None:
                get, setters[kind] = pair
                states[kind] = get()
    except Exception as error:  # of whatever kind a device's runtime raises
        return {}, {}, error
    return states, setters, None


def _sendable(problem: Exception | None) -> Exception | None:
    """Return what is wrong as an exception that can be sent to other processes."""
    if problem is None or type(problem) is ValueError:
        return problem
    text = f"{type(problem).__name__}: {problem}"
    return RuntimeError(f"The random generators of process 0 could not be read ({text}).")


def _generator(
    kind: RNGType, generator: torch.Generator | None
) -> tuple[Callable[[], _State], Callable[[_State], Any]] | None:
    """Return how a generator is read and written, or None where its device is not here."""
    if kind == RNGType.TORCH:
        return torch.get_rng_state, torch.set_rng_state
    if kind == RNGType.GENERATOR:
        if generator is None:
            raise ValueError("rng type 'generator' needs a torch.Generator; pass it as `generator`.")
        return generator.get_state, generator.set_state
    device = device_spec(kind.value)
    if not device.is_available():
        warn(f"rng type {kind.value!r} is left out: there is no {kind.value} device here.")
        return None
    return device.get_rng_state, device.set_rng_state
