"""megatron-core's process groups and random generators."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel.megatron.arguments import parallel_arguments
from accel.parallel.alone import ensure_group
from accel_ops.objects import broadcast_object_list
from accel_state.packages import require

if TYPE_CHECKING:
    from accel_state.process import Process

__all__ = ["check_device", "core", "fields_of", "parallel_state", "start"]


def core(module: str) -> Any:
    """Import a module of megatron-core.

    Args:
        module: Its name below `megatron.core`.

    Raises:
        ImportError: If it is not there; the message names the command that installs it.
    """
    require("megatron.core", "megatron")
    return require(f"megatron.core.{module}", "megatron")


def parallel_state() -> Any:
    """Import the module with megatron-core's process groups."""
    return core("parallel_state")


def fields_of(kind: Any) -> set[str]:
    """Return the names of a configuration class's arguments."""
    return {field.name for field in dataclasses.fields(kind) if field.init}


def check_device(device: torch.device) -> None:
    """Refuse devices that megatron-core does not compute on.

    Raises:
        ValueError: If it is no CUDA device.
    """
    if device.type != "cuda":
        raise ValueError(
            "Megatron-LM trains on CUDA devices, where megatron-core allocates its tensors, and this "
            "process "
            f"runs on {device}. Train with ParallelismConfig(tp_size=...) and FSDP2 instead, which run here."
        )


def start(args: Mapping[str, Any], process: Process) -> None:
    """Make the process groups, and seed the generators of tensor parallelism; twice is once.

    Args:
        args: Settings by Megatron-LM's names.
        process: This process.

    Raises:
        ValueError: If the processes cannot be arranged as the settings say, or another Accelerator has
            arranged them otherwise.
    """
    sizes = parallel_arguments({**args, "num_layers_per_virtual_pipeline_stage": None})
    model = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        model *= sizes.get(name, 1)
    if process.world_size % model:
        raise ValueError(
            f"tp_degree({sizes['tensor_model_parallel_size']}) * "
            f"pp_degree({sizes['pipeline_model_parallel_size']}) * "
            f"context_parallel_size({sizes.get('context_parallel_size', 1)}) = {model} does not divide the "
            f"number of processes ({process.world_size})."
        )
    state = parallel_state()
    if state.model_parallel_is_initialized():
        _check_same(state, sizes)
        return
    ensure_group(process)
    state.initialize_model_parallel(**sizes)
    seed = broadcast_object_list([torch.initial_seed() % 2**31], process=process)[0]
    core("tensor_parallel").model_parallel_cuda_manual_seed(seed)


def _check_same(state: Any, sizes: Mapping[str, Any]) -> None:
    present = (state.get_tensor_model_parallel_world_size(), state.get_pipeline_model_parallel_world_size())
    wanted = (sizes["tensor_model_parallel_size"], sizes["pipeline_model_parallel_size"])
    if present != wanted:
        raise ValueError(
            f"megatron-core's processes are arranged with (tp_degree, pp_degree) = {present} already, and "
            f"this MegatronLMPlugin asks for {wanted}. One program has one arrangement."
        )
