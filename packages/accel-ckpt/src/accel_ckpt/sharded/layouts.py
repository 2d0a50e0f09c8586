"""The layout of a state's tensors over the processes, and whether it is the same on all of them.

If so, each process knows which replica of a tensor's shard it has, and the main process need not plan who
writes it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class Layout(NamedTuple):
    """The layout of a state, as seen by one process.

    Attributes:
        digest: Digest of names, shapes, types and placements; equal on all processes if the layout is.
        meshes: For each of `meshes_of`, a digest of its ranks, and their number. If the digests of layouts
            are equal, the n-th mesh of each process has the same tensors.
    """

    digest: str
    meshes: tuple[tuple[bytes, int], ...]


class Replica(NamedTuple):
    """Which replica of a shard a process has: `number`, from 0, of `copies`."""

    number: int
    copies: int


def meshes_of(state: Mapping[str, Any]) -> list[DeviceMesh]:
    """List the meshes of the tensors of a flat state dict, in the order of the tensors' names."""
    tensors = (state[name] for name in sorted(state) if isinstance(state[name], DTensor))
    return [*dict.fromkeys(tensor.device_mesh for tensor in tensors)]


def layout_of(
    state: Mapping[str, Any], paths: Mapping[str, Any], meshes: Sequence[DeviceMesh]
) -> Layout | None:
    """Describe the entries of a state, and the layout of its tensors.

    Args:
        state: The flat state dict.
        paths: For each name, its keys in the nested state dict.
        meshes: Its meshes; see `meshes_of`.

    Returns:
        The layout; None if the state has tensors whose shards only their process knows.
    """
    digest = hashlib.sha256()
    numbers = {mesh: number for number, mesh in enumerate(meshes)}
    for name in sorted(state):
        kind = _kind(state[name], numbers)
        if kind is None:
            return None
        digest.update(repr((name, paths.get(name), *kind)).encode())
    return Layout(digest.hexdigest(), tuple((_ranks_of(mesh), mesh.size()) for mesh in meshes))


def _ranks_of(mesh: DeviceMesh) -> bytes:
    return hashlib.sha256(f"{mesh.shape} ".encode() + mesh.mesh.numpy().tobytes()).digest()


def _kind(value: Any, numbers: Mapping[DeviceMesh, int]) -> tuple[Any, ...] | None:
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        # Not on this process; a partial sum; a local tensor that plans its writes itself.
        plans = hasattr(value._local_tensor, "__create_write_items__")
        if mesh.get_coordinate() is None or plans or any(item.is_partial() for item in value.placements):
            return None
        # Not the mesh's ranks: processes may have equal tensors on different meshes.
        return "parts", value.shape, value.dtype, value.placements, mesh.shape, numbers[mesh]
    if isinstance(value, ShardedTensor) or hasattr(value, "__create_write_items__"):
        return None
    if isinstance(value, torch.Tensor):
        return "tensor", value.shape, value.dtype
    return ("value",)


def common_replicas(layouts: Sequence[Layout | None], rank: int) -> list[Replica] | None:
    """Find which replica of each mesh a process is in, if all have the same layout.

    Meshes of the same tensors are replicas if they partition the processes. With FSDP and tensor parallelism,
    a weight that is not in the plan of the latter is replicated like this: of 2 x 2 processes 0 and 2 have a
    full copy of it on their mesh, and 1 and 3 another on theirs.

    Args:
        layouts: The layouts of all processes, in rank order.
        rank: The rank of the process.

    Returns:
        For each mesh of this process, in the order of `meshes_of`, which replica it is; None if the layouts
        differ, or meshes of the same tensors overlap.
    """
    complete = [layout for layout in layouts if layout is not None]
    if len(complete) < len(layouts) or len({layout.digest for layout in complete}) > 1:
        return None
    replicas = []
    for index, (ranks, size) in enumerate(complete[rank].meshes):
        # Numbered by their first process, which is the same on all.
        processes = Counter(layout.meshes[index][0] for layout in complete)
        # A process lists only its own meshes. So if as many list a mesh as it has ranks, these are its ranks.
        if set(processes.values()) != {size}:
            return None
        replicas.append(Replica([*processes].index(ranks), len(processes)))
    return replicas
