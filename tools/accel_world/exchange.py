"""Run one call on several workers, and collect the result of each."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import wait

from accel_world.messages import Call, Leave, Reply
from accel_world.process import Worker
from accel_world.report import Outcome, describe_exit

__all__ = ["exchange"]

GRACE_S = 2.0  # what the other ranks get once one has failed
LEAVE_S = 10.0  # to leave the process group and clean up


def exchange(workers: list[Worker], calls: list[Call], timeout_s: float) -> list[Outcome]:
    """Run each worker's call; return the outcomes in order. Workers that died or got stuck are killed."""
    for worker, call in zip(workers, calls, strict=True):
        _send(worker, call)
    outcomes = _collect(workers, range(len(workers)), timeout_s)
    for rank, outcome in outcomes.items():
        if outcome.kind == "returned":
            _send(workers[rank], Leave())
    present = [rank for rank, outcome in outcomes.items() if outcome.kind in ("returned", "raised")]
    for rank, ending in _collect(workers, present, LEAVE_S).items():
        outcomes[rank] = _merge(outcomes[rank], ending)
    return [outcomes[rank] for rank in range(len(workers))]


def _send(worker: Worker, message: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # it died this moment; collecting finds out
        worker.connection.send_bytes(pickle.dumps(message))


def _collect(workers: list[Worker], ranks: Iterable[int], timeout_s: float) -> dict[int, Outcome]:
    """Wait for one answer of each rank; once one has failed, the others get only a moment more."""
    outcomes: dict[int, Outcome] = {}
    pending = list(ranks)
    deadline = time.monotonic() + timeout_s
    while pending and (left_s := deadline - time.monotonic()) > 0:
        answers = [workers[rank].connection for rank in pending]
        ends = [workers[rank].end for rank in pending]  # its socket may stay open in a child that it left
        ready = wait([*answers, *ends], left_s)
        for rank in pending:
            if workers[rank].connection in ready or workers[rank].end in ready:
                outcomes[rank] = _receive(workers[rank])
                if outcomes[rank].kind != "returned":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        pending = [rank for rank in pending if rank not in outcomes]
    stacks = {rank: workers[rank].stack() for rank in pending}  # all of them before any is killed
    for rank, stack in stacks.items():
        workers[rank].kill()
        outcomes[rank] = Outcome("stuck", stack, output=workers[rank].new_output())
    return outcomes


def _receive(worker: Worker) -> Outcome:
    try:
        if not worker.connection.poll():
            raise EOFError
        reply: Reply = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.kill()
        return Outcome("died", f"{describe_exit(worker.returncode)}\n{worker.new_output()}")
    if reply.worn:
        worker.kill()
    if reply.failure and not reply.left:
        _send(worker, Leave())  # which also frees the ranks that wait for this one
    kind = "raised" if reply.failure else "returned"
    return Outcome(kind, reply.failure, reply.result, worker.new_output())


def _merge(outcome: Outcome, ending: Outcome) -> Outcome:
    """Join what came of the call with what came of leaving, which counts only when it failed."""
    if ending.kind == "returned":
        return replace(outcome, output=outcome.output + ending.output)
    account = "\n".join(filter(None, [outcome.account, ending.account]))
    return Outcome(ending.kind, account, outcome.result, outcome.output + ending.output)
