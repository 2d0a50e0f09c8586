"""Random numbers under tensor parallelism: dropout is the same on all processes of a group.

Weights that the plan does not split (norms, embeddings, biases) are replicated, and have equal gradients only
if the activations are equal on all processes of a group. Models draw from torch's generators, and some from
Python's or numpy's (a layer that is left out by chance, say).
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from accel_state.devices.table import device_spec


class SharedRandomState:
    """Forward hooks that broadcast the random state of the first process of a group, in training.

    Nothing is sent while forward passes use no random numbers.

    Args:
        group: The processes that split the weights.
        device: This process's device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._uses_random = True  # until a forward pass does not
        self._before: torch.Tensor | None = None

    def attach(self, model: torch.nn.Module) -> None:
        """Register the hooks."""
        model.register_forward_pre_hook(self.before_forward, prepend=True)
        model.register_forward_hook(self.after_forward)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, model: torch.nn.Module, inputs: Any) -> None:
        """Use the random state of the first rank, if the last forward pass used random numbers."""
        self._before = None
        if model.training:
            self._before = self._state()
            if self._uses_random:
                first = self._before.to(self._device, copy=True)
                dist.broadcast(first, dist.get_global_rank(self._group, 0), group=self._group)
                first = first.cpu()
                if not torch.equal(first, self._before):
                    self._set_state(first)
                    self._before = first

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Record whether the forward pass used random numbers.

        Raises:
            RuntimeError: If it did for the first time, with different states on the processes.
        """
        if self._before is None:
            return
        uses_random = not torch.equal(self._state(), self._before)
        if uses_random and not self._uses_random:
            states = [torch.empty_like(self._before, device=self._device) for _ in range(self._group.size())]
            dist.all_gather(states, self._before.to(self._device), group=self._group)
            if any(not torch.equal(state, states[0]) for state in states):
                raise RuntimeError(
                    f"{type(model).__name__} drew random numbers in forward for the first time (dropout was "
                    "switched on), and the processes that split its weights (tp) drew different ones: their "
                    "copies of the weights that are not split would drift apart. Call set_seed() on all of "
                    "them before, with the same seed."
                )
        self._uses_random = uses_random

    def _state(self) -> torch.Tensor:
        """The states of Python's, numpy's and torch's generators, as one tensor of bytes on the CPU."""
        states = [_other_state(), torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.as_tensor(device_spec(self._device).get_rng_state()))
        return torch.cat(states)

    def _set_state(self, state: torch.Tensor) -> None:
        sizes = [_other_state().numel(), torch.get_rng_state().numel()]
        others, cpu, device = state.tensor_split([sizes[0], sum(sizes)])
        _set_other_state(others)
        # Clones: torch reads a generator's state as aligned memory.
        torch.set_rng_state(cpu.clone())
        if self._device.type != "cpu":
            device_spec(self._device).set_rng_state(device.clone())


def _other_state() -> torch.Tensor:
    """The states of Python's and numpy's generators, as bytes."""
    (_, words, gauss), numpy = random.getstate(), np.random.get_state(legacy=False)
    numbers = [*words, math.nan if gauss is None else gauss]
    numbers += [*numpy["state"]["key"].tolist(), numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]]
    # A float64 has any 32-bit integer exactly. Bytes compare bit for bit, also NaN.
    return torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)


def _set_other_state(state: torch.Tensor) -> None:
    (version, words, _), numpy = random.getstate(), np.random.get_state(legacy=False)
    first, second = (item.tolist() for item in state.view(torch.float64).tensor_split([len(words) + 1]))
    *words, gauss = first
    random.setstate((version, tuple(map(int, words)), None if math.isnan(gauss) else gauss))
    *key, position, has_gauss, gauss = second
    numpy["state"] = {"key": np.array(key, np.uint32), "pos": int(position)}
    np.random.set_state({**numpy, "has_gauss": int(has_gauss), "gauss": gauss})
