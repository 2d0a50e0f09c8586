"""How the tensors of a state lie on the processes, and whether all processes agree on it.

Where they do, each process knows which of the copies of a tensor's part it has, and needs no plan of the main
process to share them out.
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
    """What a process knows by itself.

    Attributes:
        digest: Of names, shapes, types and placements; the same on all processes where the layout is.
        meshes: For each of `meshes_of`, a digest of its ranks, and how many ranks it has. Where the digest of
            the layout is the same, the n-th of each process has the same tensors.
    """

    digest: str
    meshes: tuple[tuple[bytes, int], ...]


class Replica(NamedTuple):
    """Which of the copies of a part a process has: `number`, from 0, of `copies`."""

    number: int
    copies: int


def meshes_of(state: Mapping[str, Any]) -> list[DeviceMesh]:
    """List the meshes that tensors of a flat state dict lie on, in the order of the tensors' names."""
    tensors = (state[name] for name in sorted(state) if isinstance(state[name], DTensor))
    return [*dict.fromkeys(tensor.device_mesh for tensor in tensors)]


def layout_of(
    state: Mapping[str, Any], paths: Mapping[str, Any], meshes: Sequence[DeviceMesh]
) -> Layout | None:
    """Describe what a state has, and how its tensors lie.

    Args:
        state: The flat state dict.
        paths: For each name, its keys in the nested one.
        meshes: Its meshes; see `meshes_of`.

    Returns:
        The layout; None if the state has tensors of which parts are known to each process alone.
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
        # Not on this process; a sum that is still to be made; a local tensor that plans by itself.
        plans = hasattr(value._local_tensor, "__create_write_items__")
        if mesh.get_coordinate() is None or plans or any(item.is_partial() for item in value.placements):
            return None
        # Not the mesh's ranks: processes may have tensors alike on meshes of their own.
        return "parts", value.shape, value.dtype, value.placements, mesh.shape, numbers[mesh]
    if isinstance(value, ShardedTensor) or hasattr(value, "__create_write_items__"):
        return None
    if isinstance(value, torch.Tensor):
        return "tensor", value.shape, value.dtype
    return ("value",)


def common_replicas(layouts: Sequence[Layout | None], rank: int) -> list[Replica] | None:
    """Find which copy of each mesh a process is in, where all have the same layout.

    Meshes of the same tensors are copies of each other if they divide the processes. With FSDP and tensor
    parallelism, a weight that is left out of the plan of the latter has such: of 2 x 2 processes 0 and 2 have
    a whole copy of it on their mesh, and 1 and 3 another on theirs.

    Args:
        layouts: Of all processes, in rank order.
        rank: The process.

    Returns:
        For each mesh of this process, in the order of `meshes_of`, which copy it is; None if the layouts
        differ, or meshes of the same tensors overlap.
    """
    known = [one for one in layouts if one is not None]
    if len(known) < len(layouts) or len({one.digest for one in known}) > 1:
        return None
    copies = []
    for place, (ranks, size) in enumerate(known[rank].meshes):
        # Numbered by their first process, which is the same on all.
        processes = Counter(one.meshes[place][0] for one in known)
        # A process names a mesh that it is in. So if as many name one as it has ranks, these are its ranks.
        if set(processes.values()) != {size}:
            return None
        copies.append(Replica([*processes].index(ranks), len(processes)))
    return copies
