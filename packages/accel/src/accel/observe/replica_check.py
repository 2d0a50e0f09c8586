"""An observer that checks whether replicas are equal: one number per optimizer, every N steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from accel.engines.distributed import DistributedEngine
from accel.observe.sync import replicas_may_differ
from accel_ops.debug.digest import digest
from accel_state import env
from accel_state.step_events import Observer

if TYPE_CHECKING:
    from accel.training.run import Run
    from accel_state.process.info import ProcessInfo


def steps_between_checks(process: ProcessInfo) -> int:
    """ACCELERATE_CHECK_REPLICAS_STEPS, by default 1 in debug mode; 0 for no checks.

    Raises:
        ValueError: If the number is negative.
    """
    steps: int | None = env.get("ACCELERATE_CHECK_REPLICAS_STEPS")
    every = (1 if process.debug else 0) if steps is None else steps
    if every < 0:
        raise ValueError(f"ACCELERATE_CHECK_REPLICAS_STEPS={steps}: set a number of steps, or 0.")
    return 0 if process.world_size == 1 else every


class ReplicaCheck(Observer):
    """Compares replicated parameters between processes, before each so many steps of an optimizer.

    Args:
        run: The run.
        every: The number of steps.
    """

    def __init__(self, run: Run, every: int) -> None:
        self._run = weakref.ref(run)  # which refers to its observers
        self._every = every
        self._num_steps: Any = WeakIdKeyDictionary()  # of each optimizer, by its first parameter

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the parameters of an optimizer, if it is due; every process calls it.

        Raises:
            RuntimeError: If a parameter differs; on all processes that have it, with its name.
        """
        run = self._run()
        if run is None:  # a program may keep the optimizer alone
            return
        engine, process = run.engine, run.process
        if not isinstance(engine, DistributedEngine) or replicas_may_differ(run):
            return
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        # By the first parameter: optimizers may be wrapped again between steps.
        number = self._num_steps.get(parameters[0], 0) + 1 if parameters else 1
        if parameters:
            self._num_steps[parameters[0]] = number
        if number % self._every:
            return
        groups: dict[dist.ProcessGroup | None, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for parameter in parameters:
            if engine.parameters.is_shard(parameter) or parameter.is_meta:
                continue  # each process has another shard
            for group, local in _replicas(parameter):
                groups.setdefault(group, []).append((parameter, local))
        for group, replicas in groups.items():
            # Integer digests of the bits: floating-point sums depend on their order, and NaN equals nothing.
            sums = torch.stack([digest(local).to(process.device) for _, local in replicas])
            # One number first; which parameter differs is only checked if it does.
            if _differs(sums.sum().reshape(1), group).any():
                first = int(_differs(sums, group).nonzero()[0])
                raise RuntimeError(
                    f"{_name(replicas[first][0], run)} differs between processes, before step "
                    f"{number}: its digest is {int(sums[first])} on process {process.rank}. The processes "
                    "would train different weights from here on. Something changed it, or its "
                    "gradient, only on some processes: under an `if` of the rank, by different random "
                    "numbers, or without accelerator.backward()."
                )


def _replicas(parameter: torch.Tensor) -> Iterator[tuple[dist.ProcessGroup | None, torch.Tensor]]:
    """This process's shard of a parameter, with each group over which it is replicated; None is all."""
    # Imported here: only sharded models need them, and they take half a second to import.
    from torch.distributed.tensor import DTensor

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


def _name(parameter: torch.Tensor, run: Run) -> str:
    for model in run.prepared.models:
        plain = run.engine.unwrap_model(model, keep_torch_compile=False)
        for name, item in plain.named_parameters():
            if item is parameter:
                return f"{type(plain).__name__}.{name}"
    return f"A tensor of shape {tuple(parameter.shape)} that belongs to no prepared model"
