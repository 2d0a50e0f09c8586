"""What the Accelerator's arguments mean under DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.engines.common.ignored import tell_ignored
from accel_state import env
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.engines.deepspeed.plugin import DeepSpeedPlugin
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.parallelism.config import ParallelismConfig

__all__ = [
    "active_plugin",
    "precision_under",
    "resolve_deepspeed",
    "steps_under",
    "tell_replicas",
    "tell_unused",
]


def active_plugin(state: AcceleratorState) -> DeepSpeedPlugin:
    """The plugin that is active now, of an Accelerator that trains under DeepSpeed.

    Args:
        state: The Accelerator's.
    """
    plugin: DeepSpeedPlugin = state.deepspeed_plugin
    return plugin


def resolve_deepspeed(plugin: Any, plugins: Any, *, switched_on: bool = False) -> Any:
    """The plugin, or several by name: as given, or that of the environment; None without any.

    Args:
        plugin: One plugin.
        plugins: Several by name.
        switched_on: Whether the environment asks for DeepSpeed.

    Raises:
        TypeError: If one is no DeepSpeedPlugin.
        ValueError: If both arguments are given.
    """
    if plugin is not None and plugins is not None:
        raise ValueError("Accelerator got deepspeed_plugin and deepspeed_plugins: pass one of them.")
    given = plugin if plugins is None else plugins
    if given is None and not switched_on:
        return None
    from accel.engines.deepspeed.plugin import DeepSpeedPlugin

    if given is None:
        return DeepSpeedPlugin()
    for item in given.values() if isinstance(given, dict) else [given]:
        if not isinstance(item, DeepSpeedPlugin):
            raise TypeError(f"deepspeed_plugin takes a DeepSpeedPlugin, or a dict of them, not {item!r}.")
    return given


def steps_under(plugins: Any, steps: int, accumulation: Any) -> int:
    """The steps of a window: as given, or DeepSpeed's own in the place of the default, 1."""
    first = _first(plugins)
    own = None if first is None else first.gradient_accumulation_steps
    return own if steps == 1 and accumulation is None and isinstance(own, int) else steps


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


def tell_unused(plugin: DeepSpeedPlugin) -> None:
    """Warn of settings that are given and that nothing reads.

    Args:
        plugin: The plugin, with the values of its configuration and the environment.
    """
    reasons = {
        f"offload_{what}_nvme_path": f"offload_{what}_device is not 'nvme'"
        for what in ("optimizer", "param")
        if getattr(plugin, f"offload_{what}_device") != "nvme"
    }
    if not plugin.enable_msamp:
        reasons["msamp_opt_level"] = "enable_msamp is not set"
    if plugin.zero_stage != 3:
        reasons["transformer_moe_cls_names"] = "parameters are sharded by zero_stage=3 alone"
    given = {name: reason for name, reason in reasons.items() if getattr(plugin, name) not in (None, "none")}
    tell_ignored(plugin, given)
