"""Device meshes as newer versions of torch make them, on older versions too."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from accel_state.imports.packages import is_torch_version

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_last_world: weakref.ref[Any] | None = None


def init_device_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Make a mesh of all processes, as torch's function of that name does. Every process must call it.

    Args:
        device_type: Type of the devices, such as "cpu".
        shape: Processes along each axis.
        names: The names of the axes.
    """
    global _last_world
    # On first use, as this package works without torch.
    import torch.distributed as dist
    from torch.distributed import device_mesh

    if _last_world is not None and _last_world() is not dist.group.WORLD:
        _forget_meshes(getattr(device_mesh, "_mesh_resources", None))
    mesh = device_mesh.init_device_mesh(device_type, shape, mesh_dim_names=names)
    _last_world = weakref.ref(dist.group.WORLD)
    return mesh


def _forget_meshes(resources: Any) -> None:
    """Drop the meshes of process groups that are gone.

    torch 2.6 to 2.9 cache them for the whole program, and reuse them for new groups of the same ranks.
    """
    for name in ("child_to_root_mapping", "root_to_flatten_mapping", "flatten_name_to_root_dims"):
        getattr(resources, name, {}).clear()
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    # torch's cache of DTensor operations refers to meshes too. Up to torch 2.9 each thread has a cache, and a
    # new object drops them all; engines clear those of later versions with a function.
    if tensor is not None and is_torch_version("<", "2.10"):
        propagator = tensor.DTensor._op_dispatcher.sharding_propagator
        cache = type(propagator.propagate_op_sharding)
        propagator.propagate_op_sharding = cache(propagator.propagate_op_sharding_non_cached)
