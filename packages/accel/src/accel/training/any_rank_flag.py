"""Whether a flag is set on any process: for triggers and preemption."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_ops.collectives import waits
from accel_ops.debug import check_collectives
from accel_state.process.rendezvous import gloo_group

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


class AnyRankFlag:
    """Combines a flag of each process with "or"; the result is the same on all processes.

    The flags travel between CPUs in a separate process group, so that no device is waited for.

    Args:
        process: This process.
    """

    def __init__(self, process: ProcessInfo) -> None:
        self._process = process
        self._flag: torch.Tensor | None = None
        self._work: Any = None

    def check(self, name: str, is_set: bool) -> bool:
        """Combine the flags, and wait for the result. Every process calls it.

        Args:
            name: The caller's name, for messages in debug mode.
            is_set: Whether this process's flag is set.

        Returns:
            Whether any process's flag is set.
        """
        if self._process.debug:
            check_collectives.check(name, process=self._process)
        self._start(is_set)
        return self._result()

    def check_previous(self, is_set: bool) -> bool:
        """Start to combine the flags, and return the result of the previous call. Every process calls it.

        Called once per step it waits for nothing: processes of one run wait for each other in each step
        anyway, so that the flags of the previous call have arrived.

        Args:
            is_set: Whether this process's flag is set.

        Returns:
            Whether any process's flag was set at the previous call; False at first.
        """
        result = self._flag is not None and self._result()
        self._start(is_set)
        return result

    def _start(self, is_set: bool) -> None:
        self._flag = torch.tensor([is_set], dtype=torch.uint8, device="cpu")  # gloo reduces no bool
        if self._process.world_size > 1:
            group = gloo_group("agreements")
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group, async_op=True)

    def _result(self) -> bool:
        if self._work is not None:
            waits.wait(self._work)
        result = self._flag is not None and bool(self._flag)
        self._flag = self._work = None
        return result
