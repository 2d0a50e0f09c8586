"""Replicated weights of a tensor-parallel group, which each process uses for its shard of the features."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ParallelStyle

from accel.engines.torch_private import direct_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SummedGradients(ParallelStyle):
    """Sums the gradients of a module's own parameters over the group, for norms per head, say."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        module.forward = SummedForward(module, device_mesh)
        return module


class SummedForward:
    """A module's forward whose parameters pass their gradients through a sum over a group.

    Args:
        module: The module.
        mesh: The group, one axis.
    """

    def __init__(self, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        self.module, self.forward, self.mesh = module, module.forward, mesh
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward."""
        # Restored after the call: optimizers and state dicts need the leaves.
        parameters = direct_parameters(self.module)
        original = dict(parameters)
        for name, parameter in original.items():
            if parameter is not None and parameter.requires_grad:
                parameters[name] = _summed(parameter, self.mesh.get_group())
        try:
            return self.forward(*args, **kwargs)
        finally:
            parameters.update(original)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        # A view: the parameter itself stays a leaf.
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A copy: the sum is in place, and other nodes may use this gradient.
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _summed(parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.nn.Parameter:
    apply: Callable[..., Any] = _Summed.apply
    return cast("torch.nn.Parameter", apply(parameter, group))
