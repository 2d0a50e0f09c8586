"""Assignment of shards to writing processes, if all have the same tensors in the same layout.

In torch.distributed.checkpoint every process sends its full plan to the main process, which removes
duplicates. Here each process computes its write items itself, so that the main process only receives the
location of each written shard.
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
    state: Mapping[str, Any], replicas: Mapping[DeviceMesh, Replica], rank: int, size: int
) -> list[WriteItem]:
    """Choose the write items of a process: each shard once, balanced over the processes.

    Args:
        state: The flat state dict, of one layout on all processes.
        replicas: For each mesh, which replica it is; see `common_replicas`.
        rank: The rank of the process.
        size: The number of processes.
    """
    # By mesh and placements: which replica of the shards this process has, and the bytes of the tensors.
    kinds: dict[Any, tuple[Replica, dict[str, int]]] = {}
    for name, value in state.items():
        kind: Any = None
        replica = Replica(rank, size)
        if isinstance(value, DTensor):
            kind = value.device_mesh, value.placements
            replica = _replica_of(value, replicas[value.device_mesh])
        nbytes = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
        kinds.setdefault(kind, (replica, {}))[1][name] = nbytes
    chosen: dict[str, Any] = {}
    for replica, sizes in kinds.values():
        writers = choose_writers(sizes, replica.copies)
        chosen |= {name: state[name] for name, writer in writers.items() if writer == replica.number}
    items = create_default_local_save_plan(chosen, is_coordinator=False).items
    # A tensor with fewer rows than processes has empty shards.
    return [item for item in items if not _is_empty_shard(item)]


def choose_writers(sizes: Mapping[str, int], copies: int) -> dict[str, int]:
    """Choose which of the processes that have the same shards writes each of them.

    Largest first, each to the process with the least bytes so far (longest processing time first, Graham
    1969, https://doi.org/10.1137/0117039).

    Args:
        sizes: Bytes of each tensor, by name.
        copies: The number of processes that have each shard.

    Returns:
        The number of the replica that is written, by name.
    """
    loads = [(0, copy) for copy in range(copies)]  # a heap
    chosen = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, copy = loads[0]
        heapq.heapreplace(loads, (load + max(sizes[name], 1), copy))
        chosen[name] = copy
    return chosen


def _replica_of(value: DTensor, replica: Replica) -> Replica:
    """Return which replica of its shard this process has, over all replicas of its mesh."""
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # otherwise there would be no common layout
    number, count = replica
    for dim, placement in enumerate(value.placements):
        if placement.is_replicate():
            number = number * mesh.size(dim) + coordinate[dim]
            count *= mesh.size(dim)
    return Replica(number, count)


def _is_empty_shard(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and data.size.numel() > 0 and data.chunk.sizes.numel() == 0
