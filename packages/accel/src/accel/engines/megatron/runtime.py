"""megatron-core's process groups and random generators."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel.engines.common.single_process_group import ensure_process_group
from accel.engines.megatron.arguments import parallel_arguments
from accel_ops.collectives.objects import broadcast_object_list
from accel_state.imports.packages import require
from accel_state.process import rendezvous

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)

_group: weakref.ref[Any] | None = None  # the default group that megatron-core's own groups belong to


def core(module: str) -> Any:
    """Import a module of megatron-core.

    Args:
        module: Its name below `megatron.core`.

    Raises:
        ImportError: If it is not installed; the message names the command that installs it.
    """
    # First the package: that it is missing is another error than a missing module in it.
    require("megatron.core", "megatron")
    return require(f"megatron.core.{module}", "megatron")


def parallel_state() -> Any:
    """Import the module with megatron-core's process groups."""
    return core("parallel_state")


def fields_of(kind: Any) -> set[str]:
    """Return the names of a configuration class's arguments."""
    return {field.name for field in dataclasses.fields(kind) if field.init}


def check_device(device: torch.device) -> None:
    """Reject devices that megatron-core does not support.

    Raises:
        ValueError: If it is not a CUDA device.
    """
    if device.type != "cuda":
        raise ValueError(
            "Megatron-LM trains on CUDA devices, where megatron-core allocates its tensors, but this process "
            f"runs on {device}. Train with ParallelismConfig(tp_size=...) and FSDP2 instead, which run here."
        )


def start(args: Mapping[str, Any], process: ProcessInfo) -> None:
    """Create the process groups, and seed the generators of tensor parallelism; idempotent.

    Args:
        args: Settings by Megatron-LM's names.
        process: This process.

    Raises:
        ValueError: If the sizes do not fit the number of processes, or differ from those of another
            Accelerator.
    """
    # Virtual stages depend on the model's layers, which are unknown here; `build` sets their number.
    sizes = parallel_arguments({**args, "num_layers_per_virtual_pipeline_stage": None})
    model = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        model *= sizes.get(name, 1)
    # The rest of the product is data parallelism.
    if process.world_size % model:
        raise ValueError(
            f"tp_degree({sizes['tensor_model_parallel_size']}) * "
            f"pp_degree({sizes['pipeline_model_parallel_size']}) * "
            f"context_parallel_size({sizes.get('context_parallel_size', 1)}) = {model} does not divide the "
            f"number of processes ({process.world_size})."
        )
    ensure_process_group(process)
    state = parallel_state()
    _follow_group(state)
    if state.model_parallel_is_initialized():
        _check_same(state, sizes)
        return
    # megatron-core's groups are global: all models of a process use the same ones.
    state.initialize_model_parallel(**sizes)
    # One seed for all, from which megatron-core derives those of tensor-parallel ranks; its generators take
    # 31 bits.
    seed = broadcast_object_list([torch.initial_seed() % 2**31], process=process)[0]
    core("tensor_parallel").model_parallel_cuda_manual_seed(seed)


def _follow_group(state: Any) -> None:
    """Make megatron-core forget the groups of a process group that is, or is about to be, destroyed."""
    global _group
    now = dist.group.WORLD
    if _group is not None and _group() is not now:
        state.destroy_model_parallel()
    _group = weakref.ref(now)
    # Its groups are destroyed before the default one, from which they were created.
    rendezvous.before_destroy(state.destroy_model_parallel)


def _check_same(state: Any, sizes: Mapping[str, Any]) -> None:
    existing = {name: getattr(state, f"get_{name.removesuffix('_size')}_world_size")() for name in _SIZES}
    tensor = sizes["tensor_model_parallel_size"]
    wanted = {**dict.fromkeys(_SIZES, 1), "expert_tensor_parallel_size": tensor, **sizes}
    if existing != wanted:
        raise ValueError(
            f"megatron-core already has process groups with {existing}, but this MegatronLMPlugin needs "
            f"{wanted}. A program has one arrangement at a time: call end_training() before the next."
        )
