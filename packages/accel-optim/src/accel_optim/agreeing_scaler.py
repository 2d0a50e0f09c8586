"""A gradient scaler for gradients that are in parts on several processes: all skip the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor


class AgreeingGradScaler(ShardedGradScaler):
    """Torch's ShardedGradScaler, which also takes gradients that are DTensors, on one mesh or on several.

    What one process finds not to be finite counts on all processes of the default group.

    Args:
        device: Type of the device that the losses are on.
        **options: Those of `torch.amp.GradScaler`.
    """

    def __init__(self, device: str, **options: Any) -> None:
        # Not the group that there was when torch's module was imported, which its default is.
        super().__init__(device=device, process_group=None, **options)

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """The flags that are true on any process; all processes have to call it.

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
            optimizer: The optimizer. Also a fused one is skipped on the host: its kernel would ask this
                process's gradients alone.
            *args: Passed to its step.
            **kwargs: Passed to its step.

        Returns:
            What its step returned; None if it was skipped.
        """
        if not self._enabled or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return super().step(optimizer, *args, **kwargs)
        # torch has no public way to ask a scaler how far it is with an optimizer (2.13).
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
        """Divide this process's parts; one flag for all of them, wherever they lie and if there are none."""
        # One flag on each device: the kernel wants it beside the gradients.
        found = {found_inf.device: found_inf}
        for (device, _), parts in _local_gradients(optimizer).items():
            flag = found.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(parts, flag, inv_scale.to(device))
        for device, flag in found.items():
            if device != found_inf.device:
                found_inf += flag.to(found_inf.device)
        return {found_inf.device: found_inf}


def _local_gradients(
    optimizer: torch.optim.Optimizer,
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            # As torch's GradScaler does: of a sparse gradient the values alone are scaled.
            part = part._values() if part.is_sparse else part
            if part.numel():
                found.setdefault((part.device, part.dtype), []).append(part)
    return found
