"""What the Accelerator's arguments mean under DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_state import env
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.engines.deepspeed.plugin import DeepSpeedPlugin
    from accel_state.parallelism.config import ParallelismConfig

__all__ = [
    "precision_under",
    "steps_under",
    "tell_replicas",
]


def steps_under(plugins: Any) -> int | None:
    """The steps of a window that DeepSpeed's configuration asks for, if it does."""
    first = _first(plugins)
    steps = None if first is None else first.gradient_accumulation_steps
    return steps if isinstance(steps, int) else None


def precision_under(plugins: Any, mixed_precision: Any) -> Any:
    """The precision: as given, or the one that DeepSpeed's configuration switches on."""
    first = _first(plugins)
    # A launcher writes "no" where nothing was asked for.
    if first is None or mixed_precision is not None or env.get("ACCELERATE_MIXED_PRECISION") != "no":
        return mixed_precision
    return next((kind for kind in ("bf16", "fp16") if first.get_value(f"{kind}.enabled") is True), None)


def _first(plugins: Any) -> DeepSpeedPlugin | None:
    first: DeepSpeedPlugin | None = next(iter(plugins.values())) if isinstance(plugins, dict) else plugins
    return first


def tell_replicas(config: ParallelismConfig | None, stage: int | None) -> None:
    """Warn of replicas that ZeRO does not make: it shares out over all processes.

    Args:
        config: The sizes of the mesh; beside sp_size the replicas only make up the number of processes.
        stage: ZeRO's stage.
    """
    if config is not None and config.dp_replicate_enabled and not config.sp_enabled and stage:
        warn(
            f"dp_replicate_size={config.dp_replicate_size} in parallelism_config is ignored: stage {stage} "
            "of DeepSpeed's ZeRO shares out over all processes. Leave it out, or set zero_stage=0.",
        )
