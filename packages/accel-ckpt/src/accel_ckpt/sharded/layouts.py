"""How the tensors of a state lie on the processes, and whether all processes agree on it.

Where they do, each process knows which of the copies of a tensor's part it has, and needs no plan of the main
process to share them out.
"""

from __future__ import annotations

import hashlib
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
        meshes: Digests of the ranks of each mesh that tensors lie on, and how many these are; the same number
            of meshes wherever the digest is the same.
    """

    digest: str
    meshes: tuple[tuple[bytes, int], ...]


class Copy(NamedTuple):
    """Which of the copies of a part a process has: `number`, from 0, of `copies`."""

    number: int
    copies: int


def layout_of(state: Mapping[str, Any], paths: Mapping[str, Any]) -> Layout | None:
    """Describe what a state has, and how its tensors lie.

    Args:
        state: The flat state dict.
        paths: For each name, its keys in the nested one.

    Returns:
        The layout; None if the state has tensors of which parts are known to each process alone.
    """
    digest = hashlib.sha256()
    meshes: dict[bytes, int] = {}
    for name in sorted(state):
        kind = _kind(state[name])
        if kind is None:
            return None
        if isinstance(state[name], DTensor):
            mesh = state[name].device_mesh
            ranks = ranks_of(mesh)
            meshes.setdefault(ranks, mesh.size())
            # Not its ranks: processes may have tensors alike on meshes of their own.
            kind += ([*meshes].index(ranks),)
        digest.update(repr((name, paths.get(name), *kind)).encode())
    return Layout(digest.hexdigest(), tuple(meshes.items()))


def ranks_of(mesh: DeviceMesh) -> bytes:
    """Return a digest of the ranks of a mesh, and of how they lie in it."""
    return hashlib.sha256(f"{mesh.mesh.shape} ".encode() + mesh.mesh.numpy().tobytes()).digest()


def _kind(value: Any) -> tuple[Any, ...] | None:
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        # Not on this process; a sum that is still to be made; a local tensor that plans by itself.
        plans = hasattr(value._local_tensor, "__create_write_items__")
        if mesh.get_coordinate() is None or plans or any(item.is_partial() for item in value.placements):
            return None
        return "parts", value.shape, value.dtype, value.placements, mesh.mesh.shape
    if isinstance(value, ShardedTensor) or hasattr(value, "__create_write_items__"):
        return None
    if isinstance(value, torch.Tensor):
        return "tensor", value.shape, value.dtype
    return ("value",)


def common_copies(layouts: Sequence[Layout | None], rank: int) -> dict[bytes, Copy] | None:
    """Find which copy of each mesh a process is in, where all have the same layout.

    Meshes of the same tensors are copies of each other if each process is in one of them: as with tensor
    parallelism, where a weight that is left out of the plan lies on one mesh for each part of the others.

    Args:
        layouts: Of all processes, in rank order.
        rank: The process.

    Returns:
        For each mesh of this process, by `ranks_of`, which copy it is; None if the layouts differ, or there
        are processes that are in none of the meshes.
    """
    own = layouts[rank]
    if own is None or any(one is None or one.digest != own.digest for one in layouts):
        return None
    copies = {}
    for place, (ranks, size) in enumerate(own.meshes):
        # In order of their first process, which is the same on all. Each is in its own mesh, so that a mesh
        # which as many have as it has ranks is had by all of these.
        members: dict[bytes, int] = {}
        for one in layouts:
            assert one is not None
            mesh = one.meshes[place][0]
            members[mesh] = members.get(mesh, 0) + 1
        if set(members.values()) != {size}:
            return None
        copies[ranks] = Copy([*members].index(ranks), len(members))
    return copies
