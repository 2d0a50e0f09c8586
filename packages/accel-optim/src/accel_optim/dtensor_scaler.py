"""A gradient scaler for sharded gradients: all processes skip the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor


class DTensorGradScaler(ShardedGradScaler):
    """Torch's ShardedGradScaler, which also takes gradients that are DTensors, on one mesh or on several.

    A gradient that is not finite on one process counts on all processes of the default group.

    Args:
        device: Type of the device that the losses are on.
        **options: Those of `torch.amp.GradScaler`.
    """

    def __init__(self, device: str, **options: Any) -> None:
        # The default is the group that existed when torch's module was imported, which may be another one.
        super().__init__(device=device, process_group=None, **options)

    def true_on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are true on any process; all processes must call it.

        Args:
            flags: As many, and in the same order, on all processes.
        """
        if not flags:
            return []
        # int32, as not every backend reduces booleans.
        raised = torch.tensor(flags, dtype=torch.int32, device=self._device)
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return [bool(flag) for flag in raised.tolist()]

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step, unless the gradients of some process are not finite.

        Args:
            optimizer: The optimizer. A fused one is skipped on the host too: its kernel would check only this
                process's gradients.
            *args: Passed to its step.
            **kwargs: Passed to its step.

        Returns:
            What its step returned; None if it was skipped.
        """
        if not self._enabled or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return super().step(optimizer, *args, **kwargs)
        # torch has no public way to read a scaler's stage for an optimizer (2.13).
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Divide this process's shards; one flag for all of them, on any device and even without any."""
        # One flag on each device: the kernel needs it on the device of the gradients.
        flags = {found_inf.device: found_inf}
        for (device, _), shards in _local_gradients(optimizer).items():
            flag = flags.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(shards, flag, inv_scale.to(device))
        for device, flag in flags.items():
            if device != found_inf.device:
                found_inf += flag.to(found_inf.device)
        return {found_inf.device: found_inf}


def _local_gradients(
    optimizer: torch.optim.Optimizer,
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    gradients: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            # As torch's GradScaler does: only the values of a sparse gradient are scaled.
            local = local._values() if local.is_sparse else local
            if local.numel():
                gradients.setdefault((local.device, local.dtype), []).append(local)
    return gradients
