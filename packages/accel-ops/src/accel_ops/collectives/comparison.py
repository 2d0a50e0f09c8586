"""Comparing a short text between processes through the process group's store, even if some never come."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from accel_ops.debug.store import default_store

PATIENCE = timedelta(seconds=5)
"""How long a process waits for the others. A later one sees the recorded texts."""

_POLL_S = 0.01

_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""How many comparisons of each kind were named, per process group."""


def new_comparison_name(kind: str) -> str:
    """Return a new name for a comparison; all processes name those of a kind in one order."""
    group = dist.group.WORLD
    if group is None:  # without torch.distributed nothing is compared
        return kind
    counts = _made.setdefault(group, Counter())
    counts[kind] += 1
    return f"{kind}/{counts[kind]}"


def is_equal_on_all_ranks(
    name: str, text: str, world_size: int, patience: timedelta = PATIENCE
) -> bool | None:
    """Compare a text with those of the other processes, which may come later or not at all.

    Args:
        name: What `name_comparison` returned.
        text: What is compared; not empty.
        world_size: Number of processes.
        patience: How long to wait for the others, if no difference is found before.

    Returns:
        Whether all are equal; None if some processes have not come in time.
    """
    store = _store_of(name)
    if store is None:
        return None
    if store.compare_set("first", "", text).decode() != text:
        store.set("differ", "yes")
    if store.add("come", 1) == world_size or store.check(["differ"]):
        store.set("compared", "yes")
    end = time.monotonic() + patience.total_seconds()
    # Not store.wait, for which torch writes a warning to stderr where not all have come in time.
    while not store.check(["compared"]) and time.monotonic() < end:
        time.sleep(_POLL_S)
    if store.check(["differ"]):
        return False
    return True if store.check(["compared"]) else None


def is_first_to_differ(name: str, text: str) -> bool:
    """Compare a text with that of the process that came first, without waiting for any.

    Args:
        name: What `name_comparison` returned.
        text: What is compared; not empty.

    Returns:
        Whether it differs, on the first process that finds so.
    """
    store = _store_of(name)
    return (
        store is not None
        and store.compare_set("first", "", text).decode() != text
        and store.add("found", 1) == 1
    )


def _store_of(name: str) -> Any:
    base = default_store()
    return None if base is None else dist.PrefixStore(f"accel/comparison/{name}", base)  # type: ignore[attr-defined]
