"""Settings of MegatronLMPlugin that exclude each other, or have no effect."""

from __future__ import annotations

import dataclasses
from typing import Any

from accel.engines.common.checks import warn_of_ignored
from accel_state.imports.packages import install_hint, is_package_available

_ONE_OF = (
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
)
_OF_DATASETS = (
    "eod_mask_loss",
    "seq_length",
    "encoder_seq_length",
    "decoder_seq_length",
    "consumed_samples",
    "custom_megatron_datasets_provider_function",
)
_LOOP = "an option of Megatron-LM's training loop; log with Accelerator(log_with='tensorboard')"


def check_conflicts(plugin: Any) -> None:
    """Reject settings that exclude each other: megatron-core would read only one of them.

    Args:
        plugin: The plugin, with the environment's values.

    Raises:
        ValueError: If there are any; the message names those to leave out.
    """
    for names in _ONE_OF:
        settings = [f"{name}={getattr(plugin, name)}" for name in names if getattr(plugin, name) is not None]
        if len(settings) > 1:
            raise ValueError(
                f"MegatronLMPlugin got {' and '.join(settings)}, which mean the same. Leave all but one out."
            )
    if plugin.recompute_granularity is None:
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(plugin, name) is not None:
                raise ValueError(
                    f"{name}={getattr(plugin, name)!r} belongs to recompute_granularity='full', which is not "
                    "set. Set it, or leave the other out."
                )
    if plugin.pipeline_model_parallel_split_rank is not None:
        raise ValueError(
            f"pipeline_model_parallel_split_rank={plugin.pipeline_model_parallel_split_rank}: megatron-core "
            "places encoder and decoder itself. Leave it out."
        )
    if plugin.use_precision_aware_optimizer and not plugin.use_distributed_optimizer:
        raise ValueError(
            "use_precision_aware_optimizer=True is an option of the distributed optimizer. Set "
            "use_distributed_optimizer=True too."
        )


def check_transformer_engine(plugin: Any) -> None:
    """Reject settings that need Transformer Engine if it is not installed.

    Args:
        plugin: The plugin.

    Raises:
        ImportError: If there are any; the message names the command that installs it.
    """
    if is_package_available("transformer_engine"):
        return
    names = ["use_precision_aware_optimizer"] if plugin.use_precision_aware_optimizer else []
    if plugin.custom_model_provider_function is None:  # custom models have their own layers
        names += ["sequence_parallelism"] if plugin.sequence_parallelism else []
        names += ["context_parallel_size"] if (plugin.context_parallel_size or 1) > 1 else []
        names += ["attention_backend"] if plugin.attention_backend in ("flash", "fused") else []
    if names:
        requested = ", ".join(f"{name}={getattr(plugin, name)!r}" for name in names)
        raise ImportError(
            f"MegatronLMPlugin({requested}) needs Transformer Engine, which is not installed: "
            "megatron-core's own layers and optimizers do not support it. Install it with: "
            f"{install_hint('transformer-engine')}, or leave it out."
        )


def warn_of_unused(plugin: Any) -> None:
    """Warn of unused settings, each with the reason.

    Args:
        plugin: The plugin, with the environment's values.
    """
    reasons = {
        "tensorboard_dir": _LOOP,
        "set_all_logging_options": _LOOP,
        "lr_mult": "" if plugin.scale_lr_cond else "it applies to the parameters that scale_lr_cond chooses",
        "custom_train_step_kwargs": "" if plugin.custom_train_step_class else "of custom_train_step_class",
        "overlap_cpu_optimizer_d2h_h2d": "" if plugin.optimizer_cpu_offload else "of optimizer_cpu_offload",
        "expert_tensor_parallel_size": (
            "" if _has_experts(plugin) else "other_megatron_args has no num_moe_experts"
        ),
    }
    if not plugin.megatron_dataset_flag:
        reasons |= dict.fromkeys(_OF_DATASETS, "of Megatron's datasets, but megatron_dataset_flag=False")
    defaults = {field.name: field.default for field in dataclasses.fields(plugin)}
    unused = {name: getattr(plugin, name) for name, reason in reasons.items() if reason}
    # False requests nothing, whatever the default is.
    unread = [name for name, value in unused.items() if value is not False and value != defaults[name]]
    warn_of_ignored(plugin, {name: reasons[name] for name in unread})


def _has_experts(plugin: Any) -> bool:
    return (plugin.other_megatron_args or {}).get("num_moe_experts") is not None
