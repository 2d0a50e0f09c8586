"""Translate settings with Megatron-LM's names to arguments of megatron-core's configuration classes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from accel_state.logging.suggestion import did_you_mean

_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def selected(args: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the settings among these names that have a value.

    Args:
        args: Settings by Megatron-LM's names.
        names: Fields of a configuration class.
    """
    return {name: value for name, value in args.items() if name in names and value is not None}


def check_names(settings: Mapping[str, Any], *fields: Collection[str]) -> None:
    """Reject names in `other_megatron_args` that nothing reads.

    Args:
        settings: Settings by name.
        *fields: Names that are read.

    Raises:
        ValueError: If there are any; the message suggests the closest name.
    """
    every = {name for names in fields for name in names}
    for name in settings:
        if name not in every:
            raise ValueError(
                f"other_megatron_args has {name!r}, which is no field of megatron-core's TransformerConfig, "
                f"OptimizerConfig or DistributedDataParallelConfig.{did_you_mean(name, every)}"
            )


def params_dtype(args: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of parameters: Megatron's optimizer keeps fp32 copies of lower ones."""
    if args.get("fp16"):
        return torch.float16
    return torch.bfloat16 if args.get("bf16") else torch.float32


def parallel_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `initialize_model_parallel`."""
    return selected(args, _PARALLEL) | _virtual(args)


def transformer_arguments(args: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the arguments of TransformerConfig, except enumerations.

    Args:
        args: Settings by Megatron-LM's names.
        names: Its fields.

    Raises:
        ValueError: If layers cannot be cut into virtual pipeline stages.
    """
    dtype = params_dtype(args)
    found = selected(args, names) | _virtual(args) | {"params_dtype": dtype}
    if args["pipeline_model_parallel_size"] > 1:
        # Sequence lengths may change between batches.
        found |= {"pipeline_dtype": dtype, "variable_seq_lengths": True}
        # megatron-core also checks it for models without experts.
        found.setdefault("moe_token_dispatcher_type", "alltoall")
    if args.get("decoder_last_pipeline_num_layers") is not None:
        found["num_layers_in_last_pipeline_stage"] = args["decoder_last_pipeline_num_layers"]
    if args.get("swiglu"):
        # Megatron-LM's flag sets two fields: this and gated_linear_unit, which the parsers set.
        found["activation_func"] = torch.nn.functional.silu
    # The calling function converts the name to megatron-core's enumeration.
    found.pop("attention_backend", None)
    return found


def _virtual(args: Mapping[str, Any]) -> dict[str, Any]:
    layers = args.get("num_layers_per_virtual_pipeline_stage")
    if layers is None:
        return {}
    stages = args["pipeline_model_parallel_size"]
    total = args.get("num_layers")
    if stages < 2 or total is None or total % (stages * layers):
        raise ValueError(
            f"num_layers_per_virtual_pipeline_stage={layers} with pp_degree={stages} and {total} layers: it "
            "needs at least 2 stages, and a number of layers that is divisible by their product."
        )
    return {"virtual_pipeline_model_parallel_size": total // (stages * layers)}


def optimizer_arguments(args: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the arguments of OptimizerConfig.

    Args:
        args: Settings by Megatron-LM's names.
        names: Its fields.
    """
    found = selected(args, names) | {"params_dtype": params_dtype(args)}
    if args.get("optimizer_cpu_offload"):
        found.setdefault("optimizer_offload_fraction", 1.0)
    return found


def ddp_arguments(args: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the arguments of DistributedDataParallelConfig.

    Args:
        args: Settings by Megatron-LM's names.
        names: Its fields.
    """
    # Low-precision gradients are summed over processes in fp32, as in accel's other engines.
    found = {"grad_reduce_in_fp32": params_dtype(args) is not torch.float32} | selected(args, names)
    if found.pop("use_custom_fsdp", None):
        found["use_megatron_fsdp"] = True  # its name since megatron-core 0.13
        found.setdefault("data_parallel_sharding_strategy", "optim_grads_params")
    return found
