"""Finds processes that have left a pass, over a loader of which each process reads its own part.

Nobody knows how many batches the others have. Each process notes in the store of the process group which one
is its last, so that the others see who takes no part in a step: a wait in a collective could not be ended.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch.distributed as dist

from accel_ops.debug.store import default_store

UNEVEN_SHARDS = (
    "`datasets` has given each process a shard of the stream, and the shards differ in size",
    "pass dispatch_batches=True (in a DataLoaderConfiguration), so that process 0 reads for all evenly",
)
UNEVEN_PRESHARDED = (
    "each process was given a part of its own, and the parts differ in size",
    "prepare the whole dataset on every process, which is then shared out evenly",
)
"""Why processes have different numbers of batches, and what to do."""

_PAUSES_S = (0.0002, 0.02)  # between two looks: at first, at most

_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""How many loaders were counted, per process group."""


class ExhaustedRank(NamedTuple):
    """A process that has no batch in a step.

    Args:
        rank: The process.
        batches: How many it has in this pass.
        current_rank: The rank that asks.
        step: Number of its batch, from 1.
        why: Why their numbers of batches differ, as a clause.
        fix: What to do, as a clause.
    """

    rank: int
    batches: int
    current_rank: int
    step: int
    reason: str
    fix: str


class UnevenLoaderMonitor:
    """This process's part in the passes over one loader. All processes make it at the same point.

    A pass is named by the meetings before it and the passes since, so that passes which one process alone has
    made are forgotten at the next meeting.

    Args:
        why: Why the numbers of batches differ, as a clause.
        fix: What to do, as a clause.
    """

    def __init__(self, why: str, fix: str) -> None:
        self._why = why
        self._fix = fix
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        self._group: ReferenceType[Any] = ref(group)
        # Counted where the group is: all processes make their loaders in one order.
        counts = _made.setdefault(group, Counter())
        self._prefix = f"accel/uneven_loader/{counts['loaders']}"
        counts["loaders"] += 1
        self._meetings = 0
        self._passes = 0  # since the last meeting
        self._pass = ""
        self._step = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()  # a loader that goes elsewhere has no part in this process group

    def begin(self) -> None:
        """Begin a pass."""
        self._pass, self._step = f"{self._meetings}.{self._passes}", 0

    def record(self, step: int, last: bool) -> None:
        """Note that a batch is about to be handed out.

        Args:
            step: Its number, from 1.
            last: Whether it is the last one of this process.
        """
        self._step = step
        if last:
            self._note(step)

    def end(self, exhausted: bool) -> None:
        """End the pass.

        Args:
            exhausted: Whether there were no more batches.
        """
        self._passes += 1
        if exhausted and not self._step:
            self._note(0)

    def exhausted_rank(self) -> ExhaustedRank | None:
        """Return a process that is known to have no batch in this step."""
        store = self._store()
        if store is None or not store.check([self._pass]):
            return None
        batches, rank = map(int, store.get(self._pass).split())
        if batches >= self._step:
            return None
        return ExhaustedRank(rank, batches, self._rank, self._step, self._why, self._fix)

    def is_first_to_warn(self) -> bool:
        """Whether no process has asked this in this pass before."""
        store = self._store()
        # `add` is atomic: one process of all gets the 1.
        return store is not None and bool(store.add(f"{self._pass}/warned", 1) == 1)

    def wait_for_all(self) -> ExhaustedRank | None:
        """Wait in the middle of a step until all processes have come, or one is known not to have this step.

        Returns:
            The latter.
        """
        store = self._store()
        if store is None:
            return None
        here = f"meeting/{self._meetings}"
        come = store.add(here, 1)
        if come == self._world and self._meetings:  # nobody waits in the one before
            store.delete_key(f"meeting/{self._meetings - 1}")
        pause = _PAUSES_S[0]
        # As long as a collective would wait.
        give_up_at = time.monotonic() + store.timeout.total_seconds()
        while True:
            if missing := self.exhausted_rank():  # who has come may be in its next pass
                store.add(here, -1)
                return missing
            if come == self._world or time.monotonic() > give_up_at:  # the collective says what is amiss
                break
            time.sleep(pause)
            pause = min(pause * 1.5, _PAUSES_S[1])
            come = store.add(here, 0)
        self._meetings += 1
        self._passes = 0
        return None

    def _note(self, batches: int) -> None:
        """Note how many batches this process has, unless another one with no more has done so."""
        store = self._store()
        if store is None:
            return
        text = f"{batches} {self._rank}"
        # Another process may note at the same moment; the lowest number of batches is kept.
        seen = store.compare_set(self._pass, "", text)
        while int(seen.split()[0]) > batches:
            seen = store.compare_set(self._pass, seen.decode(), text)

    def _store(self) -> Any:
        """Return where the notes are; None if the process group is no more."""
        # Asked for each time: a process group that is made anew has another store.
        base = default_store()
        if base is None or self._group() is not dist.group.WORLD:
            return None
        return dist.PrefixStore(self._prefix, base)  # type: ignore[attr-defined]


def _nobody() -> None:
    return None
