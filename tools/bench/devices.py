"""The device that a row runs on, "cpu" or "cuda", and the message if it is missing."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = ["NOTHING_RAN", "join_group", "none_found", "waiting"]

NOTHING_RAN = 5  # pytest's own exit code where no test ran


def none_found(left: str) -> str:
    """Return the line that ends a command for GPUs where there is none.

    Args:
        left: What has not been run.
    """
    return f"gpu: no accelerator found by torch {torch.__version__}; {left}"


def waiting(device: str) -> Callable[[], object]:
    """Return the function that waits for all work of the device."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def join_group(rank: int, size: int, device: str) -> None:
    """Join the group of a worker's processes, by gloo or NCCL."""
    backend = "nccl" if device == "cuda" else "gloo"
    bound = torch.device("cuda", rank) if device == "cuda" else None
    if bound is not None:
        torch.cuda.set_device(bound)
    store = dist.HashStore() if size == 1 else None  # type: ignore[attr-defined]
    dist.init_process_group(backend, rank=rank, world_size=size, store=store, device_id=bound)
