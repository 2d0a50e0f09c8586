"""Tensor parallelism: parts of each weight on the processes of one axis, by a plan of module names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from accel.parallel.wrapping import aliases

__all__ = ["apply_tensor_parallel", "tensor_plan"]

_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def tensor_plan(model: torch.nn.Module, size: int) -> dict[str, ParallelStyle]:
    """The plan that a model has in `tp_plan` or `_tp_plan`, by full module name; the model is not changed.

    Args:
        model: The model. Its plan has module names, where `*` is any one part of a name, and for each a style
            of `torch.distributed.tensor.parallel` or its name.
        size: Processes of one tensor-parallel group.

    Raises:
        ValueError: If there is no plan, a style is not known, a name means no module, a weight is too small,
            or a weight is shared with a module that is split otherwise.
    """
    given: Mapping[str, Any] | None = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    kind = type(model).__name__
    if not given:
        raise ValueError(
            f"tp_size={size} splits the weights of {kind} by a plan, and it has none. Set model._tp_plan = "
            "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise', ...}, or leave tp_size at 1."
        )
    names = dict(model.named_modules())
    plan: dict[str, ParallelStyle] = {}
    for pattern, style in given.items():
        regex = re.escape(pattern).replace(r"\*", r"[^.]+")
        found = [name for name in names if re.fullmatch(regex, name)]
        if not found:
            raise ValueError(f"the tp plan of {kind} names {pattern!r}, and no module is called so.")
        if not isinstance(style, ParallelStyle) and style not in _STYLES:
            raise ValueError(
                f"the tp plan of {kind} has the style {style!r} for {pattern!r}; known: {', '.join(_STYLES)} "
                "and objects of torch.distributed.tensor.parallel."
            )
        for name in found:
            plan[name] = style if isinstance(style, ParallelStyle) else _STYLES[style]()
    _check_shared(model, plan)
    return plan


def _check_shared(model: torch.nn.Module, plan: Mapping[str, ParallelStyle]) -> None:
    for tied in aliases(model).values():
        owners = {name.rpartition(".")[0] for name in tied}
        if len(owners) > 1 and owners & set(plan):
            raise ValueError(
                f"{' and '.join(tied)} are one weight, and the tp plan splits one of them alone. Take "
                f"{', '.join(sorted(owners & set(plan)))} out of the plan."
            )


def apply_tensor_parallel(
    model: torch.nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle], device: torch.device
) -> None:
    """Split a model's weights in place, from those of the group's first process.

    Args:
        model: The model; it is moved to the device.
        mesh: The axis of tensor parallelism.
        plan: What `tensor_plan` returned.
        device: This process's device.
    """
    model.to(device)
    with torch.no_grad():  # what the plan leaves whole has to be the same on the processes of a group
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), group=mesh.get_group(), group_src=0)
    parallelize_module(model, mesh, plan)
