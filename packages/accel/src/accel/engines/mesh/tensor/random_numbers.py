"""Random numbers under tensor parallelism: dropout is the same on all processes of a group.

Weights that the plan does not split (norms, embeddings, biases) are replicated, and have equal gradients only
if the activations are equal on all processes of a group.
"""

from __future__ import annotations

from typing import Any

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
        """The states of torch's generators, as one tensor on the CPU."""
        state = torch.get_rng_state()
        if self._device.type == "cpu":
            return state
        return torch.cat([state, torch.as_tensor(device_spec(self._device).get_rng_state())])

    def _set_state(self, state: torch.Tensor) -> None:
        size = torch.get_rng_state().numel()
        torch.set_rng_state(state[:size])
        if self._device.type != "cpu":
            device_spec(self._device).set_rng_state(state[size:])
