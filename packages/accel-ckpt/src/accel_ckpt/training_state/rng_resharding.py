"""Random generators for another number of processes than that of the save.

The rule, for each generator (Python's, numpy's, torch's and the device's) separately:

1. A rank that existed takes its own state.
2. If the generator was in the same state on all ranks, a new rank takes that state too: generators in step
   stay in step.
3. Otherwise a new rank r gets a generator seeded with the first eight bytes of
   sha256("accel-ckpt/<generator>/<r>/" + the saved state of rank r modulo the number of ranks that saved).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_ckpt.training_state.rng import device_key

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


def fingerprints(states: dict[str, Any]) -> dict[str, str]:
    """Return a digest of the state of each generator, to compare the states of all ranks."""
    return {name: hashlib.sha256(_to_bytes(state)).hexdigest() for name, state in states.items()}


def random_states_for(
    rank: int, states: dict[str, Any], saved: Sequence[dict[str, str]], process: ProcessInfo
) -> dict[str, Any]:
    """Derive the random generators of a rank.

    Args:
        rank: The rank.
        states: The saved states of rank `rank % len(saved)`.
        saved: The `fingerprints` of the saved states of each rank, in rank order.
        process: This process, for the type of the device's generator.

    Returns:
        What `rng.set_rng_state` takes.
    """
    if rank < len(saved):
        return states
    derived = dict(states)
    for name, state in states.items():
        differs = len({prints.get(name) for prints in saved}) > 1
        if name in _SEEDED and differs:
            derived[name] = _SEEDED[name](_seed(name, rank, _to_bytes(state)))
        elif name == device_key(process) and differs:
            derived[name] = [_torch_state(_seed(name, rank, _to_bytes(state)), process.device)]
    return derived


def _seed(name: str, rank: int, raw: bytes) -> int:
    digest = hashlib.sha256(f"accel-ckpt/{name}/{rank}/".encode() + raw).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # fits into a signed 64-bit integer


def _python_state(seed: int) -> Any:
    return random.Random(seed).getstate()


def _numpy_state(seed: int) -> Any:
    import numpy as np

    # RandomState takes 32-bit integers.
    halves = [seed & 0xFFFFFFFF, seed >> 32]
    return np.random.RandomState(np.array(halves, dtype=np.uint32)).get_state()


def _torch_state(seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.Generator(device).manual_seed(seed).get_state()


_SEEDED: dict[str, Callable[[int], Any]] = {
    "random_state": _python_state,
    "numpy_random_seed": _numpy_state,
    "torch_manual_seed": _torch_state,
}


def _to_bytes(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        # Not numpy(), which needs numpy installed; the state of torch's CPU generator has 5056 bytes.
        return bytes(state.cpu().flatten().view(torch.uint8).tolist())
    if hasattr(state, "tobytes"):
        raw: bytes = state.tobytes()
        return raw
    if isinstance(state, list | tuple):
        return b"(" + b",".join(map(_to_bytes, state)) + b")"
    # Strings, ints, floats and None, whose repr is the same in every version of Python 3.
    return repr(state).encode()
