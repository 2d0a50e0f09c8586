"""The random generators of one process: Python's, numpy's, torch's and the device's."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from accel_state.devices.table import device_spec

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


def get_rng_state(process: ProcessInfo) -> dict[str, Any]:
    """Read the state of all generators.

    Args:
        process: This process; its device's generator is read.

    Returns:
        States by the names that checkpoints use. Only tensors, arrays and numbers, so that reading them back
        runs no code. numpy's is included if numpy is imported.
    """
    states: dict[str, Any] = {"random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}
    # Not imported for this: a program without numpy does not use its generator.
    if "numpy" in sys.modules:
        import numpy as np

        states["numpy_random_seed"] = np.random.get_state()
    if process.device.type != "cpu":
        states[device_key(process)] = [device_spec(process.device).get_rng_state()]
    return states


def set_rng_state(states: dict[str, Any], process: ProcessInfo) -> list[str]:
    """Set the generators to states that were read before.

    Args:
        states: What `get_rng_state` returned, here or in another implementation of these checkpoints.
        process: This process.

    Returns:
        The names of this process's generators that `states` does not have.
    """
    expected = ["random_state", "torch_manual_seed"]
    if "random_state" in states:
        # Another implementation may write the tuple as a list, and setstate needs a tuple.
        version, internal, gauss = states["random_state"]
        random.setstate((version, tuple(internal), gauss))
    if "torch_manual_seed" in states:
        torch.set_rng_state(states["torch_manual_seed"].cpu())
    if "numpy_random_seed" in states:
        import numpy as np

        np.random.set_state(states["numpy_random_seed"])
    if process.device.type != "cpu":
        expected.append(device_key(process))
        if device_key(process) in states:
            device_spec(process.device).set_rng_state(_select_state(states[device_key(process)], process))
    return [name for name in expected if name not in states]


def device_key(process: ProcessInfo) -> str:
    """Return the name of the generator of this process's device in checkpoints."""
    return f"torch_{process.device.type}_manual_seed"


def _select_state(state: Any, process: ProcessInfo) -> Any:
    """Return this process's state; other implementations save one per visible device."""
    if not isinstance(state, list | tuple):
        return state
    # By this device's index, or the first if there are fewer.
    index = process.device.index or 0
    return state[index if index < len(state) else 0]
