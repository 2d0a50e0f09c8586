"""Which processes see the same samples: the data-parallel rank and size of this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from accel_data.checks import check_rank
from accel_state.process.state import current_process

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SAME_DATA = frozenset({"tp", "cp", "sp"})
"""Axes along which processes work on the same samples."""


class DataParallelInfo(NamedTuple):
    """The data-parallel rank and size of this process.

    Args:
        size: Number of data-parallel ranks.
        rank: Index of this one.
        all_ranks_prepare: Whether all processes of the run, more than one, prepare this loader. They read it
            in one order, including those that get the same batches.
    """

    size: int
    rank: int
    all_ranks_prepare: bool

    @property
    def is_distributed(self) -> bool:
        """Whether several processes read in one order, including those that get the same batches."""
        return self.all_ranks_prepare or self.size > 1


def find_data_parallel_info(
    num_processes: int | None,
    process_index: int | None,
    mesh: DeviceMesh | None,
    data_ranks: Sequence[int] | None,
) -> DataParallelInfo:
    """Find the data-parallel rank and size of this process.

    Args:
        num_processes: Number of processes; those that run by default.
        process_index: Index of this process.
        mesh: The device mesh of the processes.
        data_ranks: See `find_data_ranks`.

    Raises:
        ValueError: If these do not match, or this process is not in the mesh.
    """
    if num_processes is not None and process_index is not None and mesh is None and data_ranks is None:
        check_rank(num_processes, process_index)
        # Loaders may be made for processes other than those that run, which then cannot compare anything.
        all_ranks_prepare = (
            num_processes > 1 and dist.is_initialized() and num_processes == dist.get_world_size()
        )
        return DataParallelInfo(num_processes, process_index, all_ranks_prepare)
    process = current_process()
    size, rank = process.world_size, process.rank
    requested = (
        size if num_processes is None else num_processes,
        rank if process_index is None else process_index,
    )
    if mesh is None and data_ranks is None:
        check_rank(*requested)
        return DataParallelInfo(*requested, requested[0] == size > 1 and dist.is_initialized())
    ranks = find_data_ranks(size, mesh, data_ranks)
    if rank not in ranks:
        raise ValueError(
            f"Process {rank} is not in torch_device_mesh, which has the processes {sorted(ranks)}."
        )
    # Data ranks count from 0 without gaps, so that the largest one says how many there are.
    rank_and_size = max(ranks.values()) + 1, ranks[rank]
    # Accept both ways of counting: the processes of the run, and the data-parallel ranks.
    if requested not in (rank_and_size, (size, rank)):
        argument = "torch_device_mesh" if data_ranks is None else "data_ranks"
        raise ValueError(
            f"num_processes={requested[0]} and process_index={requested[1]} do not match {argument}, "
            f"which splits the data into {rank_and_size[0]} shards, of which this process gets number "
            f"{rank_and_size[1]}. Leave them out."
        )
    return DataParallelInfo(*rank_and_size, len(ranks) == size > 1 and dist.is_initialized())


def find_data_ranks(
    world_size: int, mesh: DeviceMesh | None, data_ranks: Sequence[int] | None
) -> dict[int, int]:
    """Return the data-parallel rank of each participating process.

    Args:
        world_size: Number of processes that run.
        mesh: The device mesh of the processes.
        data_ranks: The data-parallel rank of each process, if there is no mesh.

    Returns:
        The data-parallel rank for each global rank: the same number if neither a mesh nor ranks are given.

    Raises:
        ValueError: If `data_ranks` does not match the processes, or the axes of the mesh have no names.
    """
    if data_ranks is None:
        return mesh_data_ranks(mesh) if mesh is not None else {rank: rank for rank in range(world_size)}
    if len(data_ranks) != world_size or set(data_ranks) != set(range(len(set(data_ranks)))):
        raise ValueError(
            f"data_ranks={list(data_ranks)} must have one entry for each of the {world_size} processes, and "
            "each number from 0 to the largest one at least once."
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
    for rank_and_size in (mesh.mesh >= 0).nonzero().tolist():
        data_rank = 0
        for axis in axes:
            # Row-major, as torch numbers the ranks of a mesh that it flattens.
            data_rank = data_rank * mesh.mesh.shape[axis] + rank_and_size[axis]
        ranks[int(mesh.mesh[tuple(rank_and_size)])] = data_rank
    return ranks
