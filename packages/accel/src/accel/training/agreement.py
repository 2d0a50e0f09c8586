"""Whether any process says yes: the question behind triggers and preemption."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_ops.collectives import waits
from accel_ops.debug import check_collectives
from accel_state.process.rendezvous import gloo_group

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


class Agreement:
    """A question that every process answers in rounds, and whose outcome is the same on all of them.

    The answers travel in a process group of their own and between CPUs, so that no device has to be waited
    for.

    Args:
        process: This process.
    """

    def __init__(self, process: ProcessInfo) -> None:
        self._process = process
        self._answer: torch.Tensor | None = None
        self._work: Any = None

    def ask(self, name: str, yes: bool) -> bool:
        """Hold one round, and wait for its outcome. Every process calls it.

        Args:
            name: Who asks, for messages in debug mode.
            yes: This process's answer.

        Returns:
            Whether any process said yes.
        """
        if self._process.debug:
            check_collectives.check(name, process=self._process)
        self._begin(yes)
        return self._outcome()

    def ask_ahead(self, yes: bool) -> bool:
        """Begin a round, and return the outcome of the one before. Every process calls it, once per step.

        In the steps of one run processes wait for each other anyway, so that the answers to the round before
        have come by now, and nobody waits.

        Args:
            yes: This process's answer.

        Returns:
            Whether any process said yes in the last round; False at first.
        """
        outcome = self._answer is not None and self._outcome()
        self._begin(yes)
        return outcome

    def _begin(self, yes: bool) -> None:
        self._answer = torch.tensor([yes], dtype=torch.uint8, device="cpu")  # gloo reduces no bool
        if self._process.world_size > 1:
            group = gloo_group("agreements")
            self._work = dist.all_reduce(self._answer, dist.ReduceOp.MAX, group, async_op=True)

    def _outcome(self) -> bool:
        if self._work is not None:
            waits.wait(self._work)
        outcome = self._answer is not None and bool(self._answer)
        self._answer = self._work = None
        return outcome
