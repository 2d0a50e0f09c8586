"""Debug mode: before a collective the processes compare what each of them is about to do.

Each process writes its operation, the shapes and dtypes of its tensors and its line in the user's code to the
process group's key-value store, and reads those of the other ranks. That needs no collective, so a mismatch
cannot become a deadlock: every process raises `DistributedOperationException`, with the operation of each
rank. A process that has left (by an exception, at the end of its script, or by destroying the process group)
records that in the store, so that the others do not wait for it.

Without debug mode none of this runs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

import torch

from accel_ops.debug.store import DistributedOperationException, Session, current_session, leave
from accel_ops.trees.walk import children, keys
from accel_state.logging.warning import user_frame, warn
from accel_state.process import hooks
from accel_state.process.info import ProcessInfo

__all__ = ["DistributedOperationException", "check", "leave"]

_SHOWN = 6  # lines of tensors that an error shows for each process


@dataclasses.dataclass(frozen=True)
class _Account:
    """The operation that one process is about to start, as plain values."""

    operation: str
    detail: str
    leaves: list[tuple[str, str]]
    place: str  # file:line in function
    site: str  # file:line without folders, which may differ between machines; "" if places may differ


def check(
    operation: str,
    data: Any = None,
    *,
    process: ProcessInfo,
    detail: str = "",
    shapes: bool = True,
    one_place: bool = True,
) -> None:
    """Compare the next operation with those of the other processes, and raise if they disagree.

    Every process must call this (it waits for the others). Nothing happens with one process.

    Args:
        operation: Name of the collective.
        data: The tree that it communicates; its structure and dtypes must agree.
        process: This process.
        detail: Arguments that must agree, as text.
        shapes: Whether the shapes must agree too, not just the numbers of dimensions.
        one_place: Whether all processes must come from the same line of code. An operation to which processes
            contribute differently (a broadcast) is often called in two branches; one warning is given then.

    Raises:
        DistributedOperationException: On every process, if they disagree, if a process has left, if the store
            is gone, or if a process does not come before the process group's timeout.
    """
    if process.world_size == 1:
        return
    # The user's line, not one of this package.
    frame = user_frame()
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    site = place.replace("\\", "/").rpartition("/")[2]
    account = _Account(operation, detail, list(_describe(data, shapes)), place, site)
    session = current_session(process)
    # As text: equal texts are not even parsed.
    written = json.dumps(dataclasses.asdict(account))
    texts = session.exchange(written, f"{operation} at {place}")
    if any(text != written for text in texts):
        accounts = [_Account(**json.loads(text)) for text in texts]
        _compare(session, accounts, one_place)


def _begin(process: ProcessInfo) -> None:
    # Not only at the first operation: a process that never reaches one can report where it is, or that it
    # left.
    current_session(process).begin()


def _check_wait(process: ProcessInfo) -> None:
    check("wait_for_everyone", process=process, one_place=False)


hooks.register(joined=_begin, waits=_check_wait, leaves=leave)


def _compare(session: Session, accounts: list[_Account], one_place: bool) -> None:
    differing = [
        name
        for name, seen in (
            ("operation", [account.operation for account in accounts]),
            ("arguments", [account.detail for account in accounts]),
            ("tensors", [account.leaves for account in accounts]),
            ("line of code", [account.site for account in accounts]),
        )
        if any(value != seen[0] for value in seen)
    ]
    if not differing:
        return  # only the folders differ
    text = (
        f"Operation {session.count} is not the same on all processes: they differ in "
        f"{', '.join(differing)}.\n{_accounts_text(accounts)}\n"
    )
    if differing != ["line of code"] or one_place:
        session.fail(
            f"{text}Every process must call the same operations, on equal tensors, in the same order."
        )
    if session.first_time(f"places of {accounts[0].operation}"):
        warn(f"{text}This is fine if it is intended.", RuntimeWarning)


def _accounts_text(accounts: list[_Account]) -> str:
    common = _common([[(path, text) for path, text in account.leaves] for account in accounts])
    lines = []
    for rank, account in enumerate(accounts):
        arguments = f"({account.detail})" if account.detail else ""
        lines.append(f"  process {rank}: {account.operation}{arguments} at {account.place}")
        # Only the differences: a batch may have hundreds of equal tensors.
        special = [f"{path}: {text}" for path, text in account.leaves if (path, text) not in common]
        if not special and len(account.leaves) <= 1:  # nothing differs; show a single tensor
            special = [f"{path}: {text}" for path, text in account.leaves]
        lines += [f"    {line}" for line in special[:_SHOWN]]
        if len(special) > _SHOWN:
            lines.append(f"    ... and {len(special) - _SHOWN} more")
    if common and any(len(account.leaves) > 1 for account in accounts):
        lines.append(f"  ({len(common)} tensors or containers are the same on all)")
    return "\n".join(lines)


def _common(rows: list[list[tuple[str, str]]]) -> set[tuple[str, str]]:
    """Return the lines that are the same on all processes."""
    common = set.intersection(*map(set, rows))
    if any(set(row) > common for row in rows):
        return common
    # The same lines everywhere, in another order: common are those before the first difference.
    equal = takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=True))
    return {column[0] for column in equal}


def _describe(data: Any, shapes: bool, path: str = "data") -> Iterator[tuple[str, str]]:
    if data is None and path == "data":
        return
    if isinstance(data, torch.Tensor):
        size = str(tuple(data.shape)) if shapes else f"with {data.dim()} dimension(s)"
        yield path, f"{str(data.dtype).removeprefix('torch.')} {size}"
        return
    inside = children(data)
    if inside is None:
        yield path, f"a {type(data).__name__}"
        return
    yield path, f"{type(data).__name__} of {len(inside)}"
    named = not isinstance(data, (list, tuple, Mapping))
    for key, child in zip(keys(data), inside, strict=True):
        yield from _describe(child, shapes, f"{path}.{key}" if named else f"{path}[{key!r}]")
