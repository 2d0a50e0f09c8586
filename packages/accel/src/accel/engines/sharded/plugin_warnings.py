"""Warnings for settings of FullyShardedDataParallelPlugin that have no effect next to others."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import wrap

from accel.engines.common.checks import warn_of_ignored
from accel_state import env


def warn_of_unused(plugin: Any) -> None:
    """Warn of unused settings, each with the reason, and reset them.

    Args:
        plugin: The plugin, complete.
    """
    policy = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy)  # of a complete one
    # The values without an argument; those of the environment are ignored without a warning.
    classes = list(env.get("FSDP_TRANSFORMER_CLS_TO_WRAP")) or None
    size = env.get("FSDP_MIN_NUM_PARAMS")
    unset: dict[str, tuple[Any, str]] = {}
    if plugin.fsdp_version == 2 and not plugin.limit_all_gathers:
        unset["limit_all_gathers"] = True, "fsdp_version=2 always does"
    if plugin.fsdp_version == 2 and plugin.cpu_ram_efficient_loading and plugin.sync_module_states is False:
        unset["sync_module_states"] = True, "with cpu_ram_efficient_loading only rank 0 has the weights"
    if plugin.activation_checkpointing_offload and not plugin.activation_checkpointing:
        unset["activation_checkpointing_offload"] = False, "activation_checkpointing is not set"
    if policy is not wrap.size_based_auto_wrap_policy and plugin.min_num_params not in (None, size):
        unset["min_num_params"] = size, "auto_wrap_policy is not 'size_based_wrap'"
    class_names = plugin.transformer_cls_names_to_wrap
    if policy is not wrap.transformer_auto_wrap_policy and class_names not in (None, classes):
        unset["transformer_cls_names_to_wrap"] = classes, "auto_wrap_policy is not 'transformer_based_wrap'"
    for name in ("state_dict_config", "optim_state_dict_config"):
        config = getattr(plugin, name)
        # Local state dicts have neither option; a sharded one has the first alone.
        if not getattr(config, "offload_to_cpu", True) or not getattr(config, "rank0_only", True):
            unset[name] = None, "states are gathered to the CPU, full ones on the first process of a machine"
    warn_of_ignored(plugin, {name: reason for name, (_, reason) in unset.items()})
    for name, (value, _) in unset.items():
        setattr(plugin, name, value)
