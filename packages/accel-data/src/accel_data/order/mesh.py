"""Which processes see the same samples, and where this one stands among those that see others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from accel_data.checks import check_place
from accel_state.process.state import current_process

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SAME_DATA = frozenset({"tp", "cp", "sp"})
"""Axes along which processes work on the same samples."""


class Place(NamedTuple):
    """Where this process stands among those that the data is divided over.

    Args:
        size: Their number.
        rank: Index of this one.
        together: Whether all processes of the run prepare this loader, more than one of them. They read it
            in one order, also those that get the same batches.
    """

    size: int
    rank: int
    together: bool

    @property
    def several(self) -> bool:
        """Whether several processes read in one order, also those that get the same batches."""
        return self.together or self.size > 1


def find_place(
    num_processes: int | None,
    process_index: int | None,
    mesh: DeviceMesh | None,
    data_ranks: Sequence[int] | None,
) -> Place:
    """Find this process's place among those that the data is divided over.

    Args:
        num_processes: Number of processes; those that run by default.
        process_index: Index of this one.
        mesh: The mesh that they form.
        data_ranks: See `find_data_ranks`.

    Raises:
        ValueError: If these do not fit each other, or the mesh does not have this process.
    """
    if num_processes is not None and process_index is not None and mesh is None and data_ranks is None:
        check_place(num_processes, process_index)
        # Loaders may be made for other processes than those that run, which then cannot compare anything.
        together = num_processes > 1 and dist.is_initialized() and num_processes == dist.get_world_size()
        return Place(num_processes, process_index, together)
    process = current_process()
    size, rank = process.world_size, process.rank
    asked = (
        size if num_processes is None else num_processes,
        rank if process_index is None else process_index,
    )
    if mesh is None and data_ranks is None:
        check_place(*asked)
        return Place(*asked, asked[0] == size > 1 and dist.is_initialized())
    ranks = find_data_ranks(size, mesh, data_ranks)
    if rank not in ranks:
        raise ValueError(
            f"Process {rank} is not in torch_device_mesh, which has the processes {sorted(ranks)}."
        )
    # Data ranks count from 0 without gaps, so that the largest one says how many there are.
    place = max(ranks.values()) + 1, ranks[rank]
    # Both ways of counting will do: the processes of the run, and the parts of the data.
    if asked not in (place, (size, rank)):
        given = "torch_device_mesh" if data_ranks is None else "data_ranks"
        raise ValueError(
            f"num_processes={asked[0]} and process_index={asked[1]} do not fit {given}, along which the data "
            f"is divided into {place[0]} parts, of which this process gets number {place[1]}. Leave them out."
        )
    return Place(*place, len(ranks) == size > 1 and dist.is_initialized())


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
            'Make it with mesh_dim_names=(...), with "tp", "cp" and "sp" for the axes that do.'
        )
    axes = [axis for axis, name in enumerate(names) if name not in _SAME_DATA]
    ranks = {}
    # A condition that always holds: `nonzero` lists every index of the mesh.
    for place in (mesh.mesh >= 0).nonzero().tolist():
        data_rank = 0
        for axis in axes:
            # Row by row, as torch numbers the ranks of a mesh that it flattens.
            data_rank = data_rank * mesh.mesh.shape[axis] + place[axis]
        ranks[int(mesh.mesh[tuple(place)])] = data_rank
    return ranks
