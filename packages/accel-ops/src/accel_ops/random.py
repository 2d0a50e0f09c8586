"""Random number generators: seeding all of them, and making those of all processes alike."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from accel_ops import collectives
from accel_state.devices import row
from accel_state.enums import RNGType
from accel_state.process import Process, current_process

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]


def set_seed(
    seed: int, device_specific: bool = False, deterministic: bool = False, *, process: Process | None = None
) -> None:
    """Seed Python's, NumPy's and torch's generators, the last on every device.

    Args:
        seed: The seed.
        device_specific: Add the rank to it, so that each process draws other numbers.
        deterministic: Make torch use deterministic algorithms where there are any (slower), and raise
            where there are none.
        process: The facts of this process; the current one by default.

    Raises:
        TypeError: If the seed is not an integer.
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"set_seed takes an integer, but got {seed!r}.")
    if device_specific:
        seed += (process or current_process()).rank
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(
    rng_type: RNGType | str | None = None,
    generator: torch.Generator | None = None,
    *,
    process: Process | None = None,
) -> None:
    """Give one generator of every process the state that process 0's has.

    Args:
        rng_type: "torch", "generator" or the name of a device; None for none.
        generator: The one that "generator" means.
        process: The facts of this process; the current one by default.

    Raises:
        ValueError: If the type is unknown, or "generator" comes without one.
    """
    synchronize_rng_states([] if rng_type is None else [rng_type], generator, process=process)


def synchronize_rng_states(
    rng_types: Sequence[RNGType | str],
    generator: torch.Generator | None = None,
    *,
    process: Process | None = None,
) -> None:
    """Give generators of every process the states that process 0's have, in one collective.

    Args:
        rng_types: "torch", "generator" and names of devices. A device that is not here is left out with a
            warning.
        generator: The one that "generator" means.
        process: The facts of this process; the current one by default.

    Raises:
        ValueError: If a type is unknown, or "generator" comes without one.
    """
    process = process or current_process()
    chosen = [_generator(RNGType(kind), generator) for kind in rng_types]
    found = [pair for pair in chosen if pair is not None]
    if process.world_size == 1 or not found:
        return
    # Cloned, because a broadcast writes in place; sent from the device, because not every backend moves
    # tensors of the CPU.
    states = [torch.as_tensor(get()).clone().to(process.device) for get, _ in found]
    collectives.broadcast(states, process=process)
    for (_, set_state), state in zip(found, states, strict=True):
        set_state(state.cpu() if state.dim() else state.item())  # XLA's state is a number


def _generator(
    kind: RNGType, generator: torch.Generator | None
) -> tuple[Callable[[], torch.Tensor | int], Callable[[Any], Any]] | None:
    """The functions that read and write a generator's state, or None where its device is not here."""
    if kind == RNGType.TORCH:
        return torch.get_rng_state, torch.set_rng_state
    if kind == RNGType.GENERATOR:
        if generator is None:
            raise ValueError("rng type 'generator' needs a torch.Generator; pass it as `generator`.")
        return generator.get_state, generator.set_state
    device = row(kind.value)
    if not device.is_available():
        warnings.warn(
            f"rng type {kind.value!r} is left out: there is no {kind.value} device here.", stacklevel=4
        )
        return None
    return device.get_rng_state, device.set_rng_state
