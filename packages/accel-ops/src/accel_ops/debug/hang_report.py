"""Which operation waits for which processes, computed from the status of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accel_ops.debug.progress import Status

_SHOWN = 8  # groups that a report lists; groups of a mesh wait for each other
_SILENT = "does not answer: it is stopped, hangs outside Python, was killed, or runs without a watchdog"
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Stuck:
    """An operation that waits.

    Attributes:
        group: The name of its process group.
        number: Which of the group's operations it is, from 1.
        arrived: Ranks that have reached it.
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
        statuses: The status of each process; None for one that does not answer.
        groups: The ranks of the process groups that this process is in, by name. Members of other groups
            are the processes whose statuses name them.
        limit_s: The limit, in seconds.
    """
    members = {name: set(ranks) for name, ranks in groups.items()}
    for rank, status in statuses.items():
        for name in status.operations if status else ():
            members.setdefault(name, set()).add(rank)
    stuck_groups = [_in_group(name, sorted(ranks), statuses, limit_s) for name, ranks in members.items()]
    # By size: the largest group is the most familiar one.
    return sorted((stuck for stuck in stuck_groups if stuck), key=lambda stuck: -len(members[stuck.group]))


def _in_group(
    group: str, ranks: Sequence[int], statuses: Mapping[int, Status | None], limit_s: float
) -> Stuck | None:
    answering = {rank: status for rank in ranks if (status := statuses.get(rank)) is not None}
    counts = {rank: status.operations.get(group, 0) for rank, status in answering.items()}
    waiting = [rank for rank, s in answering.items() if not s.left and s.waited_s >= limit_s]
    lowest, highest = min(counts.values(), default=0), max(counts.values(), default=0)
    if lowest < highest:
        arrived = [rank for rank, count in counts.items() if count > lowest]
        if not set(arrived) & set(waiting):
            return None  # the ranks that are ahead do something else
        return Stuck(group, lowest + 1, tuple(arrived), tuple(rank for rank in ranks if rank not in arrived))
    # All have started the same number: a waiting rank is in another operation than the rest, or waits for a
    # rank that does not answer.
    absent = [rank for rank in ranks if rank not in answering or answering[rank].left]
    # Debug mode waits before an operation starts, so there may be no group yet.
    waiting_here = [
        rank for rank in waiting if answering[rank].group in ("", group) and answering[rank].operation
    ]
    if not (waiting_here and absent) and not any(answering[rank].waits for rank in waiting_here):
        return None
    missing = [
        rank for rank in ranks if rank in absent or (rank not in waiting_here and not answering[rank].waits)
    ]
    return Stuck(group, highest, tuple(rank for rank in ranks if rank not in missing), tuple(missing))


def report(
    stuck: Sequence[Stuck],
    statuses: Mapping[int, Status | None],
    groups: Mapping[str, Sequence[int]],
    *,
    could_ask: bool = True,
) -> str:
    """Write what is stuck, and where each process is.

    Args:
        stuck: What `find_stuck` found.
        statuses: The status of each process.
        groups: The ranks of process groups by name.
        could_ask: Whether processes could be asked; otherwise those that did not answer are unknown.
    """
    lines = []
    for item in stuck[:_SHOWN]:
        ranks = groups.get(item.group, sorted({*item.arrived, *item.missing}))
        of = "" if len(ranks) == len(statuses) else f" of the group of {_processes(ranks)}"
        lines.append(f"  Operation {item.number}{of}: {_arrival(item, statuses, could_ask)}")
    if len(stuck) > _SHOWN:
        lines.append(f"  ... and {len(stuck) - _SHOWN} more process groups wait")
    accounts: dict[str, list[int]] = {}
    for rank in sorted(statuses):
        accounts.setdefault(_account(rank, statuses[rank], stuck, could_ask), []).append(rank)
    lines += [f"  {_processes(ranks)}: {account}" for account, ranks in accounts.items()]
    return "\n".join(lines)


def _arrival(stuck: Stuck, statuses: Mapping[int, Status | None], could_ask: bool) -> str:
    absent = [rank for rank in stuck.missing if statuses[rank] is not None]
    silent = [rank for rank in stuck.missing if statuses[rank] is None]
    if stuck.missing:
        items = [f"arrived: {_ranks(stuck.arrived) or 'none'}"]
        items += [f"not arrived: {_ranks(absent)}"] if absent else []
        items += [f"{'without answer' if could_ask else _UNKNOWN}: {_ranks(silent)}"] if silent else []
        return "; ".join(items)
    names = {status.operation for rank in stuck.arrived if (status := statuses[rank])}
    if len(names) > 1:
        return f"arrived: {_ranks(stuck.arrived)}, but not in the same operation"
    return f"arrived: {_ranks(stuck.arrived)}, which is all; it is slow, or the network is"


def _account(rank: int, status: Status | None, stuck: Sequence[Stuck], could_ask: bool) -> str:
    if status is None:
        return _SILENT if could_ask else _UNKNOWN
    group = next((item.group for item in stuck if rank in (*item.arrived, *item.missing)), status.group)
    count = status.operations.get(group, 0)
    if status.left:
        place = f" at {status.place}" if status.place else ""
        return f"left after operation {count}{place}, because {status.left}"
    if any(item.group == group and rank in item.arrived for item in stuck):
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
