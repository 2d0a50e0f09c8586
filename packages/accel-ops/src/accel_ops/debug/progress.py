"""The progress of this process: the operations of its process groups, and where its thread is."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from accel_ops.debug.stack import find_site

_LONGEST = 160  # characters of an error's text: gloo's are long, and all processes show it


@dataclass(frozen=True)
class Status:
    """The progress of one process.

    Attributes:
        operations: How many operations it has started in each process group, by the group's name.
        group: The group of the last one.
        place: The user's line where it is, as "file:line in function".
        operation: The collective that it is in, if any.
        waits: Whether it is in a function that waits for other processes.
        waited_s: How long it has not moved, in seconds.
        left: Why it has left, as the end of a sentence; empty if it has not.
    """

    operations: dict[str, int]
    group: str = ""
    place: str = ""
    operation: str = ""
    waits: bool = False
    waited_s: float = 0.0
    left: str = ""

    def to_text(self) -> str:
        """Write it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Status:
        """Read what `to_text` wrote."""
        return cls(**json.loads(text))


@dataclass
class Sampler:
    """Samples one thread of this process from another thread.

    Nothing is added to the operations themselves: process groups count them anyway.

    Args:
        thread_id: The `threading.get_ident()` of the thread that trains.
    """

    thread_id: int
    _last_state: Any = None
    _since: float = 0.0
    _group: str = ""
    _operations: dict[str, int] = field(default_factory=dict)

    def take(self) -> Status:
        """Return where the thread is, and how long it has been there."""
        site = find_site(self.thread_id)
        operations = {name: count for name, (count, _) in _groups().items()}
        for name, count in operations.items():
            if count != self._operations.get(name, 0):
                self._group = name
        now, state = time.monotonic(), (site.instruction, operations)
        if state != self._last_state:
            self._last_state, self._since = state, now
        self._operations = operations
        return Status(operations, self._group, site.place, site.operation, site.waits, now - self._since)

    def last(self, left: str, place: str = "") -> Status:
        """Return the last status of a process that leaves.

        Args:
            left: Why, as the end of a sentence.
            place: The user's line where it failed, if it did.
        """
        # Its process groups may be gone.
        seen = self._operations
        return Status({**seen, **self.take().operations}, self._group, place, left=left[:_LONGEST])


def group_ranks() -> dict[str, list[int]]:
    """Return the ranks of each process group that this process is in, by the group's name."""
    return {name: ranks for name, (_, ranks) in _groups().items()}


def _groups() -> dict[str, tuple[int, list[int]]]:
    """Return the number of operations, and the ranks, of each process group with several members."""
    counts_by_group = {}
    world: Any = dist.distributed_c10d._world  # torch has no public list of groups
    for group in list(world.pg_map):
        ranks = sorted(world.pg_group_ranks.get(group, ()))
        if len(ranks) > 1:
            counts_by_group[str(group.group_name)] = (_count(group), ranks)
    return counts_by_group


def _count(group: Any) -> int:
    # A group may have one backend per device type, or one for several types.
    counts = {}
    for device in group._device_types:
        # A backend may not count (MPI), and a group may be about to end.
        with contextlib.suppress(RuntimeError, AttributeError):
            backend = group._get_backend(device)
            counts[id(backend)] = int(backend._get_sequence_number_for_group())
    return sum(counts.values())
