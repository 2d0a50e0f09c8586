"""The meaning of the Accelerator's arguments and the plugin's settings under DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.engines.common.checks import warn_of_ignored
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.engines.context import EngineContext


def check_axes(context: EngineContext, stage: int | None) -> None:
    """Check the axes of the mesh: DeepSpeed supports sp_size, and replicas at stage 0.

    Raises:
        ValueError: If there are others.
    """
    config = context.parallelism
    if config is None:
        return
    for axis in ("tp", "cp"):
        if axis in config.active_mesh_dims:
            raise ValueError(
                f"{axis}_size={getattr(config, f'{axis}_size')} in parallelism_config, but DeepSpeed is the "
                "engine: besides its own sharding (zero_stage) it supports only sp_size. Leave "
                "deepspeed_plugin out for the others."
            )
    # With sp_size the replicas only make up the number of processes.
    if config.dp_replicate_enabled and not config.sp_enabled and stage:
        warn(
            f"dp_replicate_size={config.dp_replicate_size} in parallelism_config is ignored: stage {stage} "
            "of DeepSpeed's ZeRO shards over all processes. Leave it out, or set zero_stage=0.",
        )


def check_precision(context: EngineContext, stage: int | None, has_fp16: bool) -> None:
    """Check that DeepSpeed trains in the precision.

    Args:
        context: The engine's context.
        stage: ZeRO's stage.
        has_fp16: Whether DeepSpeed supports fp16 on this device.

    Raises:
        ValueError: If it does not.
    """
    # The quoted words are those of DeepSpeed itself.
    if context.precision.name == "fp16" and not has_fp16:
        raise ValueError(
            f"mixed_precision='fp16' under DeepSpeed on {context.process.device}: \"Type fp16 is not "
            "supported on your device.\" Use mixed_precision='bf16'."
        )
    if context.precision.name == "fp16" and stage == 0:
        raise ValueError(
            "mixed_precision='fp16' with zero_stage=0: DeepSpeed (0.19) divides gradients by a loss scale "
            "there that it has not multiplied the loss by. Use zero_stage=1, or mixed_precision='bf16'."
        )
    if context.precision.name == "fp8":
        raise ValueError(
            "mixed_precision='fp8' is not supported under DeepSpeed. Use mixed_precision='bf16', or "
            "fsdp_version=2."
        )


def warn_of_unused(plugin: Any) -> None:
    """Warn of settings that nothing reads, after the environment has been read."""
    reasons = {
        f"offload_{what}_nvme_path": f"offload_{what}_device is not 'nvme'"
        for what in ("optimizer", "param")
        if getattr(plugin, f"offload_{what}_device") != "nvme"
    }
    reasons["msamp_opt_level"] = "enable_msamp is not set"
    if plugin.zero_stage != 3:
        reasons["transformer_moe_cls_names"] = "only zero_stage=3 shards parameters"
    unset = (None, "none")
    ignored = {name: reason for name, reason in reasons.items() if getattr(plugin, name) not in unset}
    warn_of_ignored(plugin, ignored)
