"""Documented functions for single steps of what the FSDP engines do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from accel.engines.common.swap_parameters import swap_parameters
from accel.engines.fsdp_groups import apply_activation_checkpointing, choose_groups, ignored_parameters
from accel.engines.torch_private import plain_name
from accel_optim.parameter_map import ParameterMap
from accel_state import env


def enable_fsdp_ram_efficient_loading() -> None:
    """Make transformers load weights only on the first process; others create the model on meta.

    It sets ACCELERATE_USE_FSDP (where it has no value) and FSDP_CPU_RAM_EFFICIENT_LOADING in this process's
    environment, which `from_pretrained` and FullyShardedDataParallelPlugin read.
    """
    # transformers reads both variables.
    if not env.is_set("ACCELERATE_USE_FSDP"):
        env.set("ACCELERATE_USE_FSDP", True)
    env.set("FSDP_CPU_RAM_EFFICIENT_LOADING", True)


def disable_fsdp_ram_efficient_loading() -> None:
    """Make every process load weights again: FSDP_CPU_RAM_EFFICIENT_LOADING becomes false."""
    env.set("FSDP_CPU_RAM_EFFICIENT_LOADING", False)


def fsdp2_apply_ac(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """Checkpoint the activations of the modules that the plugin's auto_wrap_policy chooses, in place.

    Args:
        accelerator: With an fsdp_plugin.
        model: A model that is not sharded yet; preparing it does the same if the plugin says so.

    Returns:
        The model.

    Raises:
        ValueError: If the policy does not fit the model.
    """
    plugin = accelerator.state.fsdp_plugin
    modules = choose_groups(model, plugin).modules
    apply_activation_checkpointing(modules, bool(plugin.activation_checkpointing_offload))
    return model


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the prefixes of wrappers (FSDP1, activation checkpointing, torch.compile) from names.

    Args:
        named_params: Values by name.

    Returns:
        The same values by the names of the original model.
    """
    return {plain_name(name): value for name, value in named_params.items()}


def fsdp2_load_full_state_dict(
    accelerator: Any, model: torch.nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Load a full state into a sharded model, from the first process; every process calls it.

    Args:
        accelerator: Whose process group is used.
        model: The model, sharded with `fully_shard`; it may be on meta.
        full_sd: The full state on the first process; others may pass an empty one.
        cpu_offload: Whether shards are kept on the CPU.
    """
    # A copy: torch's function removes entries from it.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    set_model_state_dict(model, dict(full_sd), options=options)


def fsdp2_prepare_model(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """Shard a model as `prepare` does, without its other steps; a sharded model is returned unchanged.

    Args:
        accelerator: With fsdp_version=2 as its engine.
        model: The model; it is changed in place.

    Returns:
        The model.

    Raises:
        ValueError: If FSDP version 2 is not the engine, or the model cannot be sharded.
    """
    if not accelerator.is_fsdp2:
        raise ValueError(
            f"fsdp2_prepare_model shards with fully_shard, and the engine is {accelerator.engine.name}. Make "
            "the Accelerator with FullyShardedDataParallelPlugin(fsdp_version=2)."
        )
    sharded: torch.nn.Module = accelerator.engine.setup_model(model)
    return sharded


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, Any]) -> None:
    """Replace the parameters of an optimizer; groups and state stay.

    Args:
        optimizer: The optimizer; it is changed in place.
        mapping: The new parameter for each old one, or for each old one's `data_ptr()`.

    Raises:
        KeyError: If a parameter of the optimizer is not in it.
    """
    parameter_map = ParameterMap()
    for group in optimizer.param_groups:
        for number, old in enumerate(group["params"]):
            # By the object, or by the address of its values.
            new = mapping.get(old, mapping.get(old.data_ptr()))
            if new is None:
                raise KeyError(
                    f"the mapping has no parameter for number {number} of a group of "
                    f"{type(optimizer).__name__}, of shape {tuple(old.shape)}. Make it of all parameters, "
                    "before the model is sharded."
                )
            parameter_map.record(old, new)
    swap_parameters(optimizer, parameter_map.trained)


def get_parameters_from_modules(
    modules: Iterable[torch.nn.Module] | str | None, model: torch.nn.Module, device: torch.device | str
) -> set[torch.nn.Parameter]:
    """The parameters of modules that FSDP ignores, moved to a device, as FSDP does not move them.

    Args:
        modules: The modules, or a regular expression that has to match a module's full name.
        model: The model that they are in.
        device: The device of computation.

    Raises:
        ValueError: If no module of the model matches.
    """
    parameters = ignored_parameters(model, modules)
    for parameter in parameters:
        # Through .data: optimizers and tied modules have this parameter object.
        parameter.data = parameter.data.to(device)
    return parameters
