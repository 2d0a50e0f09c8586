"""A check that replicas are equal: one number per optimizer, every N steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from accel_ops.debug.digest import digest
from accel_state import env

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


class ReplicaCheck:
    """Compares replicated parameters between processes, before a step.

    It runs every ACCELERATE_CHECK_REPLICAS_STEPS steps of each optimizer; by default only in debug mode, and
    then before each step.

    Args:
        process: This process.

    Raises:
        ValueError: If the number is negative.
    """

    def __init__(self, process: ProcessInfo) -> None:
        steps = env.get("ACCELERATE_CHECK_REPLICAS_STEPS")
        self.every: int = (1 if process.debug else 0) if steps is None else steps
        if self.every < 0:
            raise ValueError(f"ACCELERATE_CHECK_REPLICAS_STEPS={steps}: set a number of steps, or 0.")
        if process.world_size == 1:
            self.every = 0
        self._process = process
        self._num_steps: Any = WeakIdKeyDictionary()  # of each optimizer, by its first parameter

    def before_step(self, parameters: Iterable[torch.Tensor], models: Iterable[torch.nn.Module]) -> None:
        """Compare the parameters of an optimizer, if it is due; every process calls it.

        Args:
            parameters: The parameters.
            models: The models to find their names in.

        Raises:
            RuntimeError: If a parameter differs; on all processes that have it, with its name.
        """
        if not self.every:
            return
        parameters = list(parameters)
        # By the first parameter: optimizers may be wrapped again between steps.
        number = self._num_steps.get(parameters[0], 0) + 1 if parameters else 1
        if parameters:
            self._num_steps[parameters[0]] = number
        if number % self.every:
            return
        groups: dict[dist.ProcessGroup | None, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for parameter in parameters:
            for group, local in _replicas(parameter):
                groups.setdefault(group, []).append((parameter, local))
        for group, replicas in groups.items():
            # Integer digests of the bits: floating-point sums depend on their order, and NaN equals nothing.
            sums = torch.stack([digest(local).to(self._process.device) for _, local in replicas])
            # One number first; which parameter differs is only checked if it does.
            if _differs(sums.sum().reshape(1), group).any():
                first = int(_differs(sums, group).nonzero()[0])
                raise RuntimeError(
                    f"{_name(replicas[first][0], models)} differs between processes, before step {number}: "
                    f"its digest is {int(sums[first])} on process {self._process.rank}. The "
                    "processes would train different weights from here on. Something changed it, or its "
                    "gradient, only on some processes: under an `if` of the rank, by different random "
                    "numbers, or without accelerator.backward()."
                )


def _replicas(parameter: torch.Tensor) -> Iterator[tuple[dist.ProcessGroup | None, torch.Tensor]]:
    """This process's shard of a parameter, with each group over which it is replicated; None is all."""
    # Imported here: only sharded models need them, and they take half a second to import.
    from torch.distributed.tensor import DTensor

    from accel.engines.fsdp1 import flat

    if flat.is_flattened(parameter) or parameter.is_meta:
        return  # each process has another shard
    if not isinstance(parameter, DTensor):
        yield None, parameter
        return
    mesh = parameter.device_mesh
    for axis, placement in enumerate(parameter.placements):
        if placement.is_replicate() and mesh.size(axis) > 1:
            yield mesh.get_group(axis), parameter.to_local()


def _differs(sums: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Which numbers differ between the processes of a group."""
    # The maximum of x and of -x in one collective: the second is the minimum. All are equal where both agree.
    extremes = torch.cat([sums, -sums])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return largest != -smallest


def _name(parameter: torch.Tensor, models: Iterable[torch.nn.Module]) -> str:
    for model in models:
        for name, item in model.named_parameters():
            if item is parameter:
                return f"{type(getattr(model, 'module', model)).__name__}.{name.removeprefix('module.')}"
    return f"A tensor of shape {tuple(parameter.shape)} that belongs to no prepared model"
