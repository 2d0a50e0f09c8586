"""Which processes of a mesh see the same samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["data_ranks"]

_SAME_DATA = frozenset({"tp", "cp", "sp"})
"""Axes along which processes work on the same samples."""


def data_ranks(mesh: DeviceMesh) -> dict[int, int]:
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
