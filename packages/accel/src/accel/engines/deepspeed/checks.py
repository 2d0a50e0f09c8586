"""What DeepSpeed cannot train with, told before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.engines.deepspeed.runtime import part

if TYPE_CHECKING:
    from accel.engines.context import EngineContext

__all__ = ["refuse_axes", "refuse_precision"]


def refuse_axes(context: EngineContext) -> None:
    """Refuse axes of a mesh that DeepSpeed does not take.

    Raises:
        ValueError: If there are some.
    """
    config = context.parallelism
    for axis in config.active_mesh_dims if config is not None else ():
        if axis in ("tp", "cp"):
            raise ValueError(
                f"{axis}_size={getattr(config, f'{axis}_size')} in parallelism_config, and DeepSpeed is the "
                "engine: beside its own sharding (zero_stage) it takes sp_size alone. Leave deepspeed_plugin "
                "out for the others."
            )


def refuse_precision(context: EngineContext, stage: int | None) -> None:
    """Refuse a precision that DeepSpeed does not train in here.

    Raises:
        ValueError: If it is one.
    """
    is_supported = part("accelerator").get_accelerator().is_fp16_supported()
    if context.precision.name == "fp16" and not is_supported:
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
            "mixed_precision='fp8' is not there under DeepSpeed. Use mixed_precision='bf16', or "
            "fsdp_version=2."
        )
