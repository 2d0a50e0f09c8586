"""One process of many, whose collectives return immediately and move no data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["fake_world"]


@contextmanager
def fake_world(rank: int, size: int, backend: str = "fake") -> Iterator[None]:
    """Be a process of a group of torch's "fake" backend.

    Args:
        rank: Which process.
        size: How many there seem to be.
        backend: As `init_process_group` takes it: "cuda:fake" is a group that moves no tensors on the CPU.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
