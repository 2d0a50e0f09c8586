"""Detects ranks that have run out of batches, for loaders of which each rank reads its own shard.

Each rank knows only its own number of batches. It publishes its last batch in the store of the process group,
so that the other ranks see who does not participate in a step, before they would hang in a collective.
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
    "pass dispatch_batches=True (in a DataLoaderConfiguration), so that process 0 reads for all processes",
)
UNEVEN_PRESHARDED = (
    "each process was given its own shard, and the shards differ in size",
    "prepare the full dataset on every process, so that it is sharded evenly",
)
"""(reason, fix): why ranks have different numbers of batches, and what to do."""

_PAUSES_S = (0.0002, 0.02)  # between two polls: first, longest

_num_loaders: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""Number of monitored loaders per process group."""


class ExhaustedRank(NamedTuple):
    """A rank that has no batch in a step.

    Args:
        rank: The rank.
        batches: Number of its batches in this iteration.
        current_rank: The rank that asks.
        step: Number of its current batch, from 1.
        reason: Why their numbers of batches differ, as a clause.
        fix: What to do, as a clause.
    """

    rank: int
    batches: int
    current_rank: int
    step: int
    reason: str
    fix: str


class UnevenLoaderMonitor:
    """Tracks which ranks have run out of batches of one loader. All ranks must create it for the same loader.

    A run over the loader is named by the number of `wait_for_all` calls before it and the runs since, so that
    runs of a single rank are dropped at the next call.

    Args:
        reason: Why the numbers of batches differ, as a clause.
        fix: What to do, as a clause.
    """

    def __init__(self, reason: str, fix: str) -> None:
        self._reason = reason
        self._fix = fix
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        self._group: ReferenceType[Any] = ref(group)
        # Counted per group: all ranks make their loaders in the same order.
        counts = _num_loaders.setdefault(group, Counter())
        self._prefix = f"accel/uneven_loader/{counts['loaders']}"
        counts["loaders"] += 1
        self._num_waits = 0
        self._num_runs = 0  # since the last wait_for_all
        self._run_key = ""
        self._step = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _none, ()  # a copy in another process is not in this process group

    def begin(self) -> None:
        """Begin a run over the loader."""
        self._run_key, self._step = f"{self._num_waits}.{self._num_runs}", 0

    def record(self, step: int, last: bool) -> None:
        """Record that a batch is about to be yielded.

        Args:
            step: Its number, from 1.
            last: Whether it is the last one of this rank.
        """
        self._step = step
        if last:
            self._publish(step)

    def end(self, exhausted: bool) -> None:
        """End the run.

        Args:
            exhausted: Whether there were no more batches.
        """
        self._num_runs += 1
        if exhausted and not self._step:
            self._publish(0)

    def exhausted_rank(self) -> ExhaustedRank | None:
        """Return a rank that is known to have no batch in this step."""
        store = self._get_store()
        if store is None or not store.check([self._run_key]):
            return None
        batches, rank = map(int, store.get(self._run_key).split())
        if batches >= self._step:
            return None
        return ExhaustedRank(rank, batches, self._rank, self._step, self._reason, self._fix)

    def is_first_to_warn(self) -> bool:
        """Whether no rank has called this before in this run."""
        store = self._get_store()
        # `add` is atomic: exactly one rank gets 1.
        return store is not None and bool(store.add(f"{self._run_key}/warned", 1) == 1)

    def wait_for_all(self) -> ExhaustedRank | None:
        """Wait in a step until all ranks have arrived, or one is known to have no batch in it.

        Returns:
            That rank; None if all have arrived.
        """
        store = self._get_store()
        if store is None:
            return None
        key = f"wait/{self._num_waits}"
        arrived = store.add(key, 1)
        if arrived == self._world and self._num_waits:  # no rank waits for the previous key
            store.delete_key(f"wait/{self._num_waits - 1}")
        pause = _PAUSES_S[0]
        # The timeout of a collective.
        give_up_at = time.monotonic() + store.timeout.total_seconds()
        while True:
            if missing := self.exhausted_rank():  # a rank that arrived may be in its next run
                store.add(key, -1)
                return missing
            if arrived == self._world or time.monotonic() > give_up_at:  # the collective reports the problem
                break
            time.sleep(pause)
            pause = min(pause * 1.5, _PAUSES_S[1])
            arrived = store.add(key, 0)
        self._num_waits += 1
        self._num_runs = 0
        return None

    def _publish(self, batches: int) -> None:
        """Publish the number of batches of this rank, unless another rank has no more and published it."""
        store = self._get_store()
        if store is None:
            return
        text = f"{batches} {self._rank}"
        # Another rank may publish at the same time; the lowest number of batches is kept.
        published = store.compare_set(self._run_key, "", text)
        while int(published.split()[0]) > batches:
            published = store.compare_set(self._run_key, published.decode(), text)

    def _get_store(self) -> Any:
        """Return the store; None if the process group was destroyed."""
        # Looked up each time: a new process group has another store.
        base = default_store()
        if base is None or self._group() is not dist.group.WORLD:
            return None
        return dist.PrefixStore(self._prefix, base)  # type: ignore[attr-defined]


def _none() -> None:
    return None
