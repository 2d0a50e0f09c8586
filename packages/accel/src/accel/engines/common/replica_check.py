"""A check that what processes have alike is alike: one number per optimizer, every N steps."""

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
    """Compares parameters between the processes that have them alike, before a step.

    It runs every ACCELERATE_CHECK_REPLICAS_STEPS steps of each optimizer; by default in debug mode alone,
    and then before each step.

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
        """Compare what an optimizer steps, if it is time to; every process calls it.

        Args:
            parameters: The parameters.
            models: Where their names are found.

        Raises:
            RuntimeError: If a parameter differs; on all processes that have it, with its name.
        """
        if not self.every:
            return
        parameters = list(parameters)
        # By the first parameter: optimizers themselves may be wrapped anew between steps.
        number = self._num_steps.get(parameters[0], 0) + 1 if parameters else 1
        if parameters:
            self._num_steps[parameters[0]] = number
        if number % self.every:
            return
        groups: dict[dist.ProcessGroup | None, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for parameter in parameters:
            for group, part in _replicas(parameter):
                groups.setdefault(group, []).append((parameter, part))
        for group, found in groups.items():
            # Integers of the bits: a sum of floating numbers depends on its order, and NaN equals nothing.
            sums = torch.stack([digest(part).to(self._process.device) for _, part in found])
            # One number first; which parameter it was is asked only if something differs.
            if _differs(sums.sum().reshape(1), group).any():
                first = int(_differs(sums, group).nonzero()[0])
                raise RuntimeError(
                    f"{_name(found[first][0], models)} differs between processes, before step {number}: "
                    f"its digest is {int(sums[first])} on process {self._process.rank}. Processes "
                    "would train weights of their own from here on. Something changed it, or its gradient, "
                    "on some processes alone: under an `if` of the rank, by other random numbers, or past "
                    "accelerator.backward()."
                )


def _replicas(parameter: torch.Tensor) -> Iterator[tuple[dist.ProcessGroup | None, torch.Tensor]]:
    """This process's part of a parameter, with each group whose processes have the same; None is all."""
    # Here: with them comes what sharded models alone need, which takes half a second to import.
    from torch.distributed.tensor import DTensor

    from accel.engines.fsdp1 import flat

    if flat.is_flattened(parameter) or parameter.is_meta:
        return  # each process has a part of its own
    if not isinstance(parameter, DTensor):
        yield None, parameter
        return
    mesh = parameter.device_mesh
    for axis, placement in enumerate(parameter.placements):
        if placement.is_replicate() and mesh.size(axis) > 1:
            yield mesh.get_group(axis), parameter.to_local()


def _differs(sums: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Which numbers some process of a group has another of."""
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
