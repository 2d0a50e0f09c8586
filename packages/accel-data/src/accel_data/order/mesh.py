"""Which processes see the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["find_data_ranks", "mesh_data_ranks"]

_SAME_DATA = frozenset({"tp", "cp", "sp"})
"""Axes along which processes work on the same samples."""


def find_data_ranks(
    world_size: int, mesh: DeviceMesh | None, data_ranks: Sequence[int] | None
) -> dict[int, int]:
    """Return the data-parallel rank of each process that takes part.

    Args:
        world_size: Number of processes that run.
        mesh: The mesh that they form.
        data_ranks: The data-parallel rank of each process, where no mesh says it.

    Returns:
        The data-parallel rank for each global rank: its own, if neither a mesh nor ranks are given.

    Raises:
        ValueError: If `data_ranks` does not fit the processes, or the axes of the mesh have no names.
    """
    if data_ranks is None:
        return mesh_data_ranks(mesh) if mesh is not None else {rank: rank for rank in range(world_size)}
    if len(data_ranks) != world_size or set(data_ranks) != set(range(len(set(data_ranks)))):
        raise ValueError(
            f"data_ranks={list(data_ranks)} must have one entry for each of the {world_size} processes, and "
            "each number from 0 on up to the largest one at least once."
        )
    return dict(enumerate(data_ranks))


def mesh_data_ranks(mesh: DeviceMesh) -> dict[int, int]:
    """Return the data-parallel rank of each process of a mesh.

    Args:
        mesh: The mesh, with named axes. All axes but tp, cp and sp divide the data.

    Returns:
        The data-parallel rank for each global rank; processes that see the same samples have the same one.

    Raises:
        ValueError: If the axes have no names.
    """
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            "torch_device_mesh has no axis names, so it does not say which processes see the same samples. "
            "Make it "
            'with mesh_dim_names=(...), with "tp", "cp" and "sp" for the axes that do.'
        )
    axes = [axis for axis, name in enumerate(names) if name not in _SAME_DATA]
    ranks = {}
    for place in (mesh.mesh >= 0).nonzero().tolist():
        data_rank = 0
        for axis in axes:
            data_rank = data_rank * mesh.mesh.shape[axis] + place[axis]
        ranks[int(mesh.mesh[tuple(place)])] = data_rank
    return ranks
