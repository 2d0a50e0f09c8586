"""Random numbers under tensor parallelism: the processes of a group drop the same activations.

Weights that no plan splits (norms, embeddings, biases) are replicas, with the same gradients only if the
activations are the same on all processes of a group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accel_state.devices.table import device_spec


class SharedDraws:
    """Hooks on a forward pass in training that share the random state of the first process of a group.

    Nothing is sent as long as forward passes draw no numbers.

    Args:
        group: The processes that split the weights.
        device: This process's device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._draws = True  # until a forward pass shows that it does not
        self._before: torch.Tensor | None = None

    def attach(self, model: torch.nn.Module) -> None:
        """Register the hooks."""
        model.register_forward_pre_hook(self.before_forward, prepend=True)
        model.register_forward_hook(self.after_forward)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, model: torch.nn.Module, inputs: Any) -> None:
        """Draw the same numbers as the others, where the last forward pass drew some."""
        self._before = None
        if model.training:
            self._before = self._state()
            if self._draws:
                first = self._before.to(self._device, copy=True)
                dist.broadcast(first, dist.get_global_rank(self._group, 0), group=self._group)
                first = first.cpu()
                if not torch.equal(first, self._before):
                    self._set_state(first)
                    self._before = first

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Note whether numbers were drawn.

        Raises:
            RuntimeError: If they were for the first time, and the processes drew different ones.
        """
        if self._before is None:
            return
        draws = not torch.equal(self._state(), self._before)
        if draws and not self._draws:
            states = [torch.empty_like(self._before, device=self._device) for _ in range(self._group.size())]
            dist.all_gather(states, self._before.to(self._device), group=self._group)
            if any(not torch.equal(state, states[0]) for state in states):
                raise RuntimeError(
                    f"{type(model).__name__} drew random numbers in forward for the first time (dropout was "
                    "switched on), and the processes that split its weights (tp) drew different ones: their "
                    "copies of the weights that are not split would drift apart. Call set_seed() on all of "
                    "them before, with the same seed."
                )
        self._draws = draws

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
