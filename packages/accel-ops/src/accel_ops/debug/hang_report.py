"""Which operation waits for which processes, from what all of them say of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accel_ops.debug.progress import Status

_SHOWN = 8  # groups that a report lists; those of a mesh wait for each other
_SILENT = "does not answer: it is stopped, hangs outside Python, was killed, or runs without a watchdog"
_UNKNOWN = "not known"


@dataclass(frozen=True)
class Stuck:
    """An operation that waits.

    Attributes:
        group: The name of its process group.
        number: Which of the group's operations it is, from 1.
        arrived: Ranks that have come to it.
        missing: Ranks that have not; empty if all have come.
    """

    group: str
    number: int
    arrived: tuple[int, ...]
    missing: tuple[int, ...]


def find_stuck(
    statuses: Mapping[int, Status | None], groups: Mapping[str, Sequence[int]], limit_s: float
) -> list[Stuck]:
    """Find the operations that have waited for longer than the limit.

    Args:
        statuses: What each process says of itself; None for one that does not answer.
        groups: The ranks of the process groups that this process is in, by name. Those of other groups are
            the processes whose statuses name them.
        limit_s: The limit, in seconds.
    """
    members = {name: set(ranks) for name, ranks in groups.items()}
    for rank, status in statuses.items():
        for name in status.operations if status else ():
            members.setdefault(name, set()).add(rank)
    found = [_in_group(name, sorted(ranks), statuses, limit_s) for name, ranks in members.items()]
    # The smallest operation numbers say nothing: the largest group is what a reader knows best.
    return sorted((stuck for stuck in found if stuck), key=lambda stuck: -len(members[stuck.group]))


def _in_group(
    group: str, ranks: Sequence[int], statuses: Mapping[int, Status | None], limit_s: float
) -> Stuck | None:
    present = {rank: status for rank in ranks if (status := statuses.get(rank)) is not None}
    counts = {rank: status.operations.get(group, 0) for rank, status in present.items()}
    waiting = [rank for rank, s in present.items() if not s.left and s.waited_s >= limit_s]
    lowest, highest = min(counts.values(), default=0), max(counts.values(), default=0)
    if lowest < highest:
        arrived = [rank for rank, count in counts.items() if count > lowest]
        if not set(arrived) & set(waiting):
            return None  # those who are ahead do something else meanwhile
        return Stuck(group, lowest + 1, tuple(arrived), tuple(rank for rank in ranks if rank not in arrived))
    # All have begun as many: who waits does so in another operation than the rest, or for a silent one.
    away = [rank for rank in ranks if rank not in present or present[rank].left]
    # Debug mode waits before an operation is begun, so that there may be no group yet.
    here = [rank for rank in waiting if present[rank].group in ("", group) and present[rank].operation]
    if not (here and away) and not any(present[rank].waits for rank in here):
        return None
    missing = [rank for rank in ranks if rank in away or (rank not in here and not present[rank].waits)]
    return Stuck(group, highest, tuple(rank for rank in ranks if rank not in missing), tuple(missing))


def report(
    stuck: Sequence[Stuck],
    statuses: Mapping[int, Status | None],
    groups: Mapping[str, Sequence[int]],
    *,
    are_asked: bool = True,
) -> str:
    """Write what is stuck, and where each process is.

    Args:
        stuck: What `find_stuck` found.
        statuses: What each process says of itself.
        groups: The ranks of process groups by name.
        are_asked: Whether processes could be asked; else nothing is known of those that did not answer.
    """
    lines = []
    for one in stuck[:_SHOWN]:
        ranks = groups.get(one.group, sorted({*one.arrived, *one.missing}))
        of = "" if len(ranks) == len(statuses) else f" of the group of {_processes(ranks)}"
        lines.append(f"  Operation {one.number}{of}: {_arrival(one, statuses, are_asked)}")
    if len(stuck) > _SHOWN:
        lines.append(f"  ... and {len(stuck) - _SHOWN} more process groups wait")
    accounts: dict[str, list[int]] = {}
    for rank in sorted(statuses):
        accounts.setdefault(_account(rank, statuses[rank], stuck, are_asked), []).append(rank)
    lines += [f"  {_processes(ranks)}: {account}" for account, ranks in accounts.items()]
    return "\n".join(lines)


def _arrival(stuck: Stuck, statuses: Mapping[int, Status | None], are_asked: bool) -> str:
    away = [rank for rank in stuck.missing if statuses[rank] is not None]
    silent = [rank for rank in stuck.missing if statuses[rank] is None]
    if stuck.missing:
        parts = [f"arrived: {_ranks(stuck.arrived) or 'none'}"]
        parts += [f"not arrived: {_ranks(away)}"] if away else []
        parts += [f"{'without answer' if are_asked else _UNKNOWN}: {_ranks(silent)}"] if silent else []
        return "; ".join(parts)
    names = {status.operation for rank in stuck.arrived if (status := statuses[rank])}
    if len(names) > 1:
        return f"arrived: {_ranks(stuck.arrived)}, but not in the same operation"
    return f"arrived: {_ranks(stuck.arrived)}, which is all; it is slow, or the network is"


def _account(rank: int, status: Status | None, stuck: Sequence[Stuck], are_asked: bool) -> str:
    if status is None:
        return _SILENT if are_asked else _UNKNOWN
    group = next((one.group for one in stuck if rank in (*one.arrived, *one.missing)), status.group)
    count = status.operations.get(group, 0)
    if status.left:
        place = f" at {status.place}" if status.place else ""
        return f"left after operation {count}{place}, because {status.left}"
    if any(one.group == group and rank in one.arrived for one in stuck):
        name = f", {status.operation}," if status.operation else ""
        return f"in operation {count}{name} at {status.place}"
    name = f"in {status.operation} " if status.operation else ""
    return f"after operation {count}, {name}at {status.place}"


def _processes(ranks: Sequence[int]) -> str:
    return f"process{'es' * (len(ranks) > 1)} {_ranks(ranks)}"


def _ranks(ranks: Iterable[int]) -> str:
    """Write ranks as "0-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
