"""Who writes which part of a state, where all processes have the same tensors in the same layout.

torch.distributed.checkpoint has every process send its whole plan to the main process, which finds there what
several of them have. Here each process finds its own parts by itself, so that the main process gets no more
than the place of each part that was written.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from accel_ckpt.sharded.layouts import Replica


def local_write_items(
    state: Mapping[str, Any], copies: Mapping[DeviceMesh, Replica], rank: int, size: int
) -> list[WriteItem]:
    """Choose what a process writes: every part once, and about as much by each process.

    Args:
        state: The flat state dict, of one layout on all processes.
        copies: For each mesh, which copy it is; see `common_replicas`.
        rank: The process.
        size: How many there are.
    """
    # By what such tensors share: which copy of its part this process has, and their bytes.
    kinds: dict[Any, tuple[Replica, dict[str, int]]] = {}
    for name, value in state.items():
        kind: Any = None
        copy = Replica(rank, size)
        if isinstance(value, DTensor):
            kind = value.device_mesh, value.placements
            copy = _copy_of(value, copies[value.device_mesh])
        nbytes = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
        kinds.setdefault(kind, (copy, {}))[1][name] = nbytes
    chosen: dict[str, Any] = {}
    for copy, sizes in kinds.values():
        writers = choose_writers(sizes, copy.copies)
        chosen |= {name: state[name] for name, writer in writers.items() if writer == copy.number}
    items = create_default_local_save_plan(chosen, is_coordinator=False).items
    # A tensor with fewer rows than processes leaves some without any.
    return [item for item in items if not _is_empty_part(item)]


def choose_writers(sizes: Mapping[str, int], copies: int) -> dict[str, int]:
    """Choose which of the processes that have the same part of tensors writes it.

    Large ones come first, and each goes to whoever has least by then (longest processing time first, Graham
    1969, https://doi.org/10.1137/0117039).

    Args:
        sizes: Bytes of each tensor, by name.
        copies: How many processes have each part.

    Returns:
        The number of the copy that is written, by name.
    """
    loads = [(0, copy) for copy in range(copies)]  # a heap
    chosen = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, copy = loads[0]
        heapq.heapreplace(loads, (load + max(sizes[name], 1), copy))
        chosen[name] = copy
    return chosen


def _copy_of(value: DTensor, copy: Replica) -> Replica:
    """Return which copy of its part this process has, of those in all copies of its mesh."""
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # or there would be no common layout
    number, count = copy
    for dim, placement in enumerate(value.placements):
        if placement.is_replicate():
            number = number * mesh.size(dim) + coordinate[dim]
            count *= mesh.size(dim)
    return Replica(number, count)


def _is_empty_part(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and data.size.numel() > 0 and data.chunk.sizes.numel() == 0
