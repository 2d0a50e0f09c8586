"""The rendezvous store of the process groups, kept for as long as the process lives.

A second process group, created after the first one was destroyed, uses the store of the first: with a new
store, a fast process could still reach the dying store of a slow rank 0.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from accel_state import env


@dataclass
class _Open:
    key: tuple[Any, ...]
    store: Any
    groups: int = 0


_open: _Open | None = None


def open_store(init_method: str, rank: int, world_size: int, timeout: timedelta | None = None) -> Any:
    """Return a store for one more process group, without keys of other groups.

    Every process must call this the same number of times.

    Args:
        init_method: URL of the rendezvous, as for `init_process_group`.
        rank: This process.
        world_size: Number of processes.
        timeout: How long to wait for the others; None for torch's default.

    Returns:
        A `torch.distributed.Store`.
    """
    global _open
    # Also what env:// reads: the same URL may later mean another address.
    address = tuple(env.raw(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    # With the process id: a fork must not use the connection of its parent.
    key = (init_method, address, rank, world_size, os.getpid())
    if _open is None or _open.key != key:
        options = {} if timeout is None else {"timeout": timeout}
        store, _, _ = next(dist.rendezvous(init_method, rank, world_size, **options))  # type: ignore[attr-defined]
        _open = _Open(key, store)
    # A later group may have another timeout than the one with which the store was opened.
    if timeout is not None:
        _open.store.set_timeout(timeout)
    _open.groups += 1
    # A prefix for each group, as every group counts from 0.
    return dist.PrefixStore(f"accel/{_open.groups}", _open.store)  # type: ignore[attr-defined]
