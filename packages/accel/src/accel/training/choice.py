"""Which engine trains, and in which precision: decided once, arguments before environment before defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.engines.deepspeed.settings import precision_under, resolve_deepspeed
from accel_state import env
from accel_state.logging.warning import warn
from accel_state.parallelism.config import ParallelismConfig

__all__ = ["Choice", "choose", "resolve_fsdp", "resolve_megatron", "resolve_parallelism"]

_SWITCHES = {
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
}


@dataclass(frozen=True)
class Choice:
    """What an Accelerator trains with, and what asked for it.

    Attributes:
        deepspeed: The DeepSpeedPlugin, or several by name; None: not asked for, as the next two.
        fsdp: The FullyShardedDataParallelPlugin.
        megatron: The MegatronLMPlugin.
        parallelism: The sizes of the mesh.
        mixed_precision: None: that of the environment, or none.
        engine_reasons: The arguments and variables that chose the engine; none: the number of processes did.
        precision_reason: What chose the precision.
    """

    deepspeed: Any
    fsdp: Any
    megatron: Any
    parallelism: ParallelismConfig | None
    mixed_precision: Any
    engine_reasons: tuple[str, ...]
    precision_reason: str


def choose(
    *,
    deepspeed_plugin: Any = None,
    deepspeed_plugins: Any = None,
    fsdp_plugin: Any = None,
    megatron_lm_plugin: Any = None,
    torch_tp_plugin: Any = None,
    parallelism_config: ParallelismConfig | None = None,
    mixed_precision: Any = None,
) -> Choice:
    """Decide from the Accelerator's arguments and the environment.

    A plugin that is given asks for its engine, whatever the environment's switches say.

    Raises:
        TypeError: If a plugin is of another engine's class.
        ValueError: If arguments contradict each other, or variables do.
    """
    given = {
        "deepspeed_plugin": deepspeed_plugin if deepspeed_plugins is None else deepspeed_plugins,
        "fsdp_plugin": fsdp_plugin,
        "megatron_lm_plugin": megatron_lm_plugin,
    }
    asked = [name for name, value in given.items() if value is not None]
    on = {name: not asked and bool(env.get(variable)) for name, variable in _SWITCHES.items()}
    deepspeed = resolve_deepspeed(deepspeed_plugin, deepspeed_plugins, switched_on=on["deepspeed_plugin"])
    megatron = resolve_megatron(megatron_lm_plugin, switched_on=on["megatron_lm_plugin"])
    parallelism = resolve_parallelism(parallelism_config, torch_tp_plugin)
    if parallelism_config is None and asked and fsdp_plugin is None:
        parallelism = _without_shards(parallelism, asked[0], torch_tp_plugin)
    fsdp = resolve_fsdp(fsdp_plugin, parallelism, deepspeed, megatron, switched_on=on["fsdp_plugin"])
    reasons = [*asked, *(variable for name, variable in _SWITCHES.items() if on[name])]
    if torch_tp_plugin is not None:
        reasons.append("torch_tp_plugin")
    if parallelism_config is not None:
        reasons.append("parallelism_config")
    elif parallelism is not None and torch_tp_plugin is None:
        reasons.append("ACCELERATE_USE_PARALLELISM_CONFIG")
    precision = precision_under(deepspeed, mixed_precision)
    return Choice(
        deepspeed=deepspeed,
        fsdp=fsdp,
        megatron=megatron,
        parallelism=parallelism,
        mixed_precision=precision,
        engine_reasons=tuple(reasons),
        precision_reason=_precision_reason(mixed_precision, precision),
    )


def _without_shards(
    config: ParallelismConfig | None, asked: str, tensor_plugin: Any
) -> ParallelismConfig | None:
    """The environment's mesh, unless FSDP shards over it and an argument asks for another engine."""
    if config is None or not config.dp_shard_cp_dim_names:
        return config
    sizes = [f"{name}_size={getattr(config, f'{name}_size')}" for name in config.dp_shard_cp_dim_names]
    warn(
        f"ACCELERATE_USE_PARALLELISM_CONFIG is ignored: the environment has {' and '.join(sizes)}, over "
        f"which FSDP shards models, and {asked} asks for another engine. Unset it, or leave {asked} out."
    )
    return resolve_parallelism(None, tensor_plugin, switched_on=False)


def _precision_reason(given: Any, resolved: Any) -> str:
    if given is not None:
        return "mixed_precision"
    if resolved is not None:
        return "DeepSpeed's configuration"
    variable = "ACCELERATE_MIXED_PRECISION"
    return variable if env.is_set(variable) and env.get(variable) else "the default"


def resolve_parallelism(
    config: ParallelismConfig | None, tensor_plugin: Any = None, *, switched_on: bool | None = None
) -> ParallelismConfig | None:
    """The mesh sizes: as given, or the environment's where the launcher says to use them.

    Args:
        config: The sizes.
        tensor_plugin: The older way to give tp_size.
        switched_on: Whether the environment's sizes count; by default where it says so.

    Raises:
        TypeError: If that is no TorchTensorParallelPlugin.
        ValueError: If the two do not go together.
    """
    if switched_on is None:
        switched_on = bool(env.get("ACCELERATE_USE_PARALLELISM_CONFIG"))
    if config is None and switched_on:
        config = ParallelismConfig()
    if tensor_plugin is not None:
        from accel.engines.mesh.tensor.plugin import TorchTensorParallelPlugin

        if not isinstance(tensor_plugin, TorchTensorParallelPlugin):
            raise TypeError(f"torch_tp_plugin takes a TorchTensorParallelPlugin, not {tensor_plugin!r}.")
        config = tensor_plugin.complete(config)
    return config


_INSTEAD_OF_SHARDS = {
    "deepspeed_plugin": "zero_stage says what is shared out over all processes, and sp_size splits sequences",
    "megatron_lm_plugin": "use_distributed_optimizer and context_parallel_size are its own settings",
}


def resolve_fsdp(
    plugin: Any,
    config: ParallelismConfig | None,
    deepspeed: Any = None,
    megatron: Any = None,
    *,
    switched_on: bool = False,
) -> Any:
    """The FSDP options: as given, those of the environment, or the defaults where the mesh has shards.

    Processes that share sequences (cp) share parameters too: they are shards.

    Args:
        plugin: The options.
        config: The sizes of the mesh.
        deepspeed: The options of DeepSpeed; None: not asked for.
        megatron: Those of Megatron-LM.
        switched_on: Whether the environment asks for FSDP.

    Raises:
        TypeError: If they are no FullyShardedDataParallelPlugin.
        ValueError: If the mesh asks for shards, and the options for version 1, which has no mesh, or nothing
            but the mesh for FSDP, and a plugin for another engine.
    """
    shards = [] if config is None else config.dp_shard_cp_dim_names
    by_mesh_alone = plugin is None and not switched_on
    if by_mesh_alone and not shards:
        return None
    if by_mesh_alone and (deepspeed is not None or megatron is not None):
        other = "megatron_lm_plugin" if deepspeed is None else "deepspeed_plugin"
        sizes = " and ".join(f"{name}_size={getattr(config, f'{name}_size')}" for name in shards)
        raise ValueError(
            f"parallelism_config has {sizes}, over which FSDP shards models, beside {other}, which asks for "
            f"another engine. Leave it out ({_INSTEAD_OF_SHARDS[other]}), or train without {other}."
        )
    from accel.engines.sharded.plugin import FullyShardedDataParallelPlugin

    if plugin is None:
        version = None if switched_on else 2
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    if not isinstance(plugin, FullyShardedDataParallelPlugin):
        raise TypeError(f"fsdp_plugin takes a FullyShardedDataParallelPlugin, not {plugin!r}.")
    if config is not None and config.active_mesh_dims and plugin.fsdp_version == 1:
        raise ValueError(
            f"parallelism_config arranges {', '.join(config.active_mesh_dims)}, and fsdp_version=1 has no "
            "mesh. Set FullyShardedDataParallelPlugin(fsdp_version=2)."
        )
    return plugin


def resolve_megatron(plugin: Any, *, switched_on: bool = False) -> Any:
    """The Megatron-LM options: as given, or those of the environment; None without any.

    Args:
        plugin: The options.
        switched_on: Whether the environment asks for Megatron-LM.

    Raises:
        TypeError: If they are no MegatronLMPlugin.
    """
    if plugin is None and not switched_on:
        return None
    from accel.engines.megatron.plugin import MegatronLMPlugin

    if plugin is None:
        return MegatronLMPlugin()
    if not isinstance(plugin, MegatronLMPlugin):
        raise TypeError(f"megatron_lm_plugin takes a MegatronLMPlugin, not {plugin!r}.")
    return plugin
