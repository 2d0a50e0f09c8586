"""One program on plain PyTorch and under an engine; what differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .accelerated import orders, run
from .engines import ENGINES
from .follow import follow
from .plain import PlainSession
from .program import Program
from .trace import Refusal, difference

__all__ = ["Outcome", "check"]


@dataclass(frozen=True)
class Outcome:
    """What came of one program.

    Attributes:
        problem: What was wrong; None where all agreed.
        refusals: What accel rejected, the same on all ranks.
        ended: Why the program ended early, the same on all ranks.
    """

    problem: str | None
    refusals: tuple[Refusal, ...] = ()
    ended: str | None = None


def check(world: Any, program: Program, engine: str, timeout_s: float = 60) -> Outcome:
    """Run a program on plain PyTorch and under an engine, and compare.

    An action that all ranks reject with the same accel error is skipped on the plain side too: it must have
    changed nothing.

    Args:
        world: The fixture `world`, or a `World`.
        program: The program.
        engine: A name of `ENGINES`.
        timeout_s: For the run of the ranks.
    """
    case = ENGINES[engine]
    try:
        ranks = world.run(run, program, engine, size=case.size, timeout_s=timeout_s)
    except Exception as error:  # of any rank, with all their tracebacks
        return Outcome(f"{type(error).__name__}: {error}")
    first = ranks[0]
    for rank, other in enumerate(ranks[1:], 1):
        if (other.refusals, other.ended) != (first.refusals, first.ended):
            return Outcome(
                f"rank 0 and {rank} refused differently: {first.refusals, first.ended} and "
                f"{other.refusals, other.ended}"
            )
    outcome = (tuple(first.refusals), first.ended)
    sizes = 1 + sum(item.before != "nothing" for item in program.micro_batches) + len(program.micro_batches)
    epochs = world.run(orders, program, sizes, size=1, timeout_s=timeout_s)[0]
    skipped = {refusal.at for refusal in first.refusals}
    try:
        expected = follow(program, PlainSession(program, case.dtype, epochs), skipped)
    except ValueError as error:
        if first.ended:  # what plain PyTorch rejects too
            return Outcome(None, *outcome)
        return Outcome(f"plain PyTorch raised {error}", *outcome)
    for rank, trace in enumerate(ranks):
        if (found := difference(trace, expected, case.tolerance)) is not None:
            return Outcome(f"rank {rank}: {found}", *outcome)
    return Outcome(None, *outcome)
