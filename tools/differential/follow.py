"""Following a program, one micro-batch after another, on plain PyTorch or through accel."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .program import LOADS, MicroBatch, Program
from .trace import Refusal, Trace

__all__ = ["MAX_NORM", "MAX_VALUE", "Session", "follow"]

MAX_NORM, MAX_VALUE = 0.5, 0.02


class Session(Protocol):
    """A training that is set up: the loop's own words, on plain PyTorch or through accel."""

    @property
    def net(self) -> torch.nn.Module:
        """The prepared model."""

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers."""

    @property
    def schedules(self) -> list[Any]:
        """Their schedules."""

    def rates(self) -> list[float]:
        """The learning rate of each group."""

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The rest of this epoch, or the next one."""

    def micro_batch(self) -> AbstractContextManager[None]:
        """The context of one micro-batch."""

    def is_boundary(self) -> bool:
        """Whether this micro-batch ends its window."""

    def finish(self) -> None:
        """Complete the window's gradients, after its last backward pass."""

    def losses(
        self, tokens: torch.Tensor, ids: torch.Tensor, flipped: bool
    ) -> AbstractContextManager[tuple[torch.Tensor, int | None]]:
        """The loss of a batch and its weight, in the context in which its backward has to run."""

    def backward(self, loss: torch.Tensor, weight: int | None, keeps_graph: bool = False) -> None:
        """Its backward pass."""

    def shown(self, loss: torch.Tensor, weight: int | None) -> float:
        """The loss of all processes."""

    def ids(self, ids: torch.Tensor) -> list[int]:
        """The samples of all processes, in ascending order."""

    def clip(self, how: str) -> float | None:
        """Clip; returns the norm, if there is one."""

    @property
    def has_saved(self) -> bool:
        """Whether there is a checkpoint."""

    def act(self, action: str) -> Any:
        """Do what comes before a micro-batch; returns what it shows, if anything.

        Raises:
            Refused: If accel rejects it.
        """

    def state(self) -> dict[str, torch.Tensor] | None:
        """The full weights, on the ranks that have them."""


class Refused(Exception):
    """accel's own error, for an action that it rejects."""


def follow(program: Program, session: Session, skipped: Collection[int] = ()) -> Trace:
    """Follow a program.

    Args:
        program: The program.
        session: What does it.
        skipped: Micro-batches before which nothing is done, as an engine rejected them there.

    Returns:
        What was seen on the way.
    """
    trace = Trace()
    batches = session.batches()
    for index, micro_batch in enumerate(program.micro_batches):
        can_act = session.has_saved or micro_batch.before != "load"
        if index not in skipped and micro_batch.before != "nothing" and can_act:
            try:
                shown = session.act(micro_batch.before)
            except Refused as error:
                trace.refusals.append(Refusal(index, micro_batch.before, str(error)))
            else:
                if shown is not None or micro_batch.before == "state":
                    trace.add(f"{micro_batch.before} before {index}", shown)
                if micro_batch.before in LOADS:
                    batches = session.batches()
        batch = next(batches, None)
        if batch is None:
            batches = session.batches()
            batch = next(batches)
        try:
            _step(program, session, trace, micro_batch, batch, f"micro-batch {index}")
        except Refused as error:
            trace.ended = f"{micro_batch.kind} of micro-batch {index}: {error}"
            return trace
    trace.add("weights at the end", session.state())
    return trace


def _step(
    program: Program,
    session: Session,
    trace: Trace,
    micro_batch: MicroBatch,
    batch: tuple[torch.Tensor, torch.Tensor],
    label: str,
) -> None:
    tokens, ids = batch
    trace.add(f"samples of {label}", session.ids(ids))
    with session.micro_batch():
        if micro_batch.kind == "give up":
            _zero(program, session)
            return
        if micro_batch.kind == "evaluate inside":
            trace.add(f"evaluation in {label}", session.act("evaluate"))
        if micro_batch.kind == "zero first":
            _zero(program, session)
        for flipped in (False, True)[: 1 + (micro_batch.kind == "two forwards")]:
            with session.losses(tokens, ids, flipped) as (loss, weight):
                trace.add(f"loss of {label}", session.shown(loss, weight))
                if micro_batch.kind == "two backwards":
                    session.backward(loss, weight, keeps_graph=True)
                if micro_batch.kind != "no backward":
                    session.backward(loss, weight)
        if micro_batch.kind == "clear":
            session.net.zero_grad()
        session.finish()
        is_boundary = session.is_boundary()
        trace.add(f"boundary at {label}", is_boundary)
        if is_boundary and program.clip != "none" and (norm := session.clip(program.clip)) is not None:
            trace.add(f"norm of {label}", norm)
        for optimizer in session.optimizers:
            optimizer.step()
        for schedule in session.schedules:
            schedule.step()
        for index, rate in enumerate(session.rates()):
            trace.add(f"rate {index} of {label}", rate)
        if micro_batch.kind != "zero first":
            _zero(program, session)


def _zero(program: Program, session: Session) -> None:
    for optimizer in session.optimizers:
        optimizer.zero_grad()
    if program.late and session.is_boundary():
        session.net.zero_grad()  # also of the block that no optimizer has yet
