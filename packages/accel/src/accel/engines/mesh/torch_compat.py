"""`fully_shard` and tensor parallelism as torch has them from 2.8 on, for torch 2.6 and 2.7 too.

Each function names the versions that need it; what to delete when the oldest version is raised.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, parallel

from accel.engines.mesh.fsdp2_private import reduce_unused
from accel_state.imports.packages import is_torch_version

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def fully_shard(
    module: torch.nn.Module, mesh: DeviceMesh, reshard_after_forward: bool | None, **options: Any
) -> fsdp.FSDPModule:
    """Shard the parameters of a module that are not in a group yet, as torch's function of that name does.

    Args:
        module: The module.
        mesh: One axis of shards, or replicas x shards.
        reshard_after_forward: Whether gathered parameters are freed after forward; None: but for those of the
            outermost module.
        options: Torch's others.
    """
    if is_torch_version("<", "2.8") and mesh.device_type == "cpu":
        _complete_cpu_streams()
        _average_by_sums()
        if is_torch_version("<", "2.7"):
            _keep_versions()
    # None is torch's default from 2.8 on. Before, it is not accepted, and the default treats the outermost
    # module in the same way.
    if reshard_after_forward is not None:
        options["reshard_after_forward"] = reshard_after_forward
    if is_torch_version("<", "2.7"):
        _use_common_root(module, mesh)
    sharded = fsdp.fully_shard(module, mesh=mesh, **options)
    if is_torch_version("<", "2.7"):
        reduce_unused(sharded)
    return sharded


def parallelize_module(
    module: torch.nn.Module, mesh: DeviceMesh, style: parallel.ParallelStyle
) -> torch.nn.Module:
    """Split a module's weights, which every process has in full, over the processes of one axis."""
    if is_torch_version(">=", "2.7"):
        # src_data_rank=None: each process takes its part without asking.
        return parallel.parallelize_module(module, mesh, style, src_data_rank=None)
    # torch 2.6 sends the first process's parts, which are the same.
    with warnings.catch_warnings():
        # It warns of random operations on CPUs, of which there are none here.
        warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
        return parallel.parallelize_module(module, mesh, style)


def _use_common_root(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Make torch find the axis of tensor parallelism on the mesh whose other axes are sharded over.

    torch 2.6 knows one mesh for equal axes: the one that was cut last.
    """
    resources: Any = import_module("torch.distributed.device_mesh")._mesh_resources
    root = resources.get_root_mesh(mesh)
    for parameter in module.parameters():
        axis = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if axis is not None and set(axis.mesh_dim_names or ()) < set(root.mesh_dim_names or ()):
            resources.child_to_root_mapping[axis] = root


@functools.cache
def _complete_cpu_streams() -> None:
    """Give streams of CPUs the methods that `fully_shard` calls: nothing waits for anything there.

    torch 2.6 has none of them, and 2.7 a `record_event` whose None fails where there are replicas.
    """
    stream: Any = torch.cpu.Stream
    stream.record_event = lambda self: torch.cpu.Event()
    stream.wait_event = lambda self, event: None


@functools.cache
def _keep_versions() -> None:
    """Make `fully_shard` gather in place unnoticed by autograd, as on accelerators: backward fails otherwise.

    What forward saved is gathered again for backward, into the same tensors (torch 2.6 on CPUs).
    """
    group: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    autograd: Any = torch.autograd
    copy_out = group.foreach_all_gather_copy_out

    def unnoticed(result: Any, parameters: Any, processes: Any) -> None:
        every = [tensor for parameter in parameters for tensor in parameter.all_gather_outputs]
        with contextlib.ExitStack() as stack:
            for tensor in every:
                if not tensor.is_inference():
                    stack.enter_context(autograd._unsafe_preserve_version_counter(tensor))
            copy_out(result, parameters, processes)

    group.foreach_all_gather_copy_out = unnoticed


@functools.cache
def _average_by_sums() -> None:
    """Make `fully_shard` divide sums of gradients: gloo cannot average before torch 2.8."""
    collectives: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    torch_factors = collectives._get_gradient_divide_factors

    def factors(shards: Any, replicas: Any, *rest: Any) -> tuple[float, float]:
        before, after = torch_factors(shards, replicas, *rest)
        if before is not None:
            return before, after
        return 1.0, float(shards.size() * (1 if replicas is None else replicas.size()))

    collectives._get_gradient_divide_factors = factors
