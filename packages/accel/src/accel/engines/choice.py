"""Which engine trains, and in which precision: decided once, arguments before environment before defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from accel.engines import ENGINES
from accel.engines.deepspeed.settings import precision_under, steps_under
from accel_state import env
from accel_state.enums import DistributedType
from accel_state.logging.warning import warn
from accel_state.parallelism.config import ParallelismConfig


@dataclass(frozen=True)
class Choice:
    """The engine, settings and precision of an Accelerator, and the reasons for them.

    Attributes:
        engine: A name of the registry; None: the processes decide.
        settings: The object that asks for it: a plugin, several of DeepSpeed's by name, or the settings of an
            engine of another package; None: nothing did.
        plugins: The documented plugins among them, by their argument of AcceleratorState.
        parallelism: The sizes of the mesh.
        mixed_precision: None: that of the environment, or none.
        steps: Micro-batches per step that the settings ask for, in place of the default; None: they do
            not.
        engine_reasons: The arguments and variables that chose the engine; none: the number of processes did.
        precision_reason: What chose the precision.
    """

    engine: str | None
    settings: Any
    plugins: Mapping[str, Any]
    parallelism: ParallelismConfig | None
    mixed_precision: Any
    steps: int | None
    engine_reasons: tuple[str, ...]
    precision_reason: str

    def engine_on(self, distributed_type: DistributedType) -> str:
        """The name of the engine for these processes.

        Args:
            distributed_type: How the processes work together, whatever the engine.

        Raises:
            ValueError: If the engine and the axes of the mesh do not go together.
        """
        # XLA shards by itself: a plugin says how, and does not make it another engine.
        if distributed_type == DistributedType.XLA and (self.engine is None or self.engine in ENGINES):
            _check_axes("xla", self.parallelism)
            return "xla"
        return self.engine or ("single" if distributed_type == DistributedType.NO else "ddp")


@dataclass(frozen=True)
class _Argument:
    """An argument of the Accelerator that takes an engine's settings."""

    path: str  # of their class
    switch: str  # the variable that asks for the engine with settings from the environment


_ARGUMENTS = {
    "deepspeed_plugin": _Argument(
        "accel.engines.deepspeed.plugin:DeepSpeedPlugin", "ACCELERATE_USE_DEEPSPEED"
    ),
    "fsdp_plugin": _Argument(
        "accel.engines.sharded.plugin:FullyShardedDataParallelPlugin", "ACCELERATE_USE_FSDP"
    ),
    "megatron_lm_plugin": _Argument(
        "accel.engines.megatron.plugin:MegatronLMPlugin", "ACCELERATE_USE_MEGATRON_LM"
    ),
}


def choose(
    *,
    deepspeed_plugin: Any = None,
    deepspeed_plugins: Any = None,
    fsdp_plugin: Any = None,
    megatron_lm_plugin: Any = None,
    torch_tp_plugin: Any = None,
    parallelism_config: ParallelismConfig | None = None,
    mixed_precision: Any = None,
    outside: Any = None,
) -> Choice:
    """Decide from the Accelerator's arguments and the environment.

    Settings that are given ask for their engine, whatever the environment's switches say.

    Args:
        deepspeed_plugin: As the Accelerator's, like all but the last.
        deepspeed_plugins: Several by name.
        fsdp_plugin: A FullyShardedDataParallelPlugin.
        megatron_lm_plugin: A MegatronLMPlugin.
        torch_tp_plugin: A TorchTensorParallelPlugin.
        parallelism_config: The sizes of the mesh.
        mixed_precision: The precision.
        outside: The settings of an engine of another package.

    Raises:
        TypeError: If a plugin is of another engine's class.
        ValueError: If arguments contradict each other, or variables do.
    """
    if deepspeed_plugin is not None and deepspeed_plugins is not None:
        raise ValueError("Accelerator got deepspeed_plugin and deepspeed_plugins: pass one of them.")
    given = {
        "deepspeed_plugin": deepspeed_plugin if deepspeed_plugins is None else deepspeed_plugins,
        "fsdp_plugin": fsdp_plugin,
        "megatron_lm_plugin": megatron_lm_plugin,
    }
    asked = [name for name, value in given.items() if value is not None]
    plugins = {name: _checked(name, given[name]) for name in asked}
    reasons = asked if outside is None else [*asked, type(outside).__name__]
    # An argument wins over every switch: a program may be started with those of another one.
    if not reasons:
        # A plugin reads the rest of its settings from the environment by itself.
        plugins = {name: _class_of(name)() for name, item in _ARGUMENTS.items() if env.get(item.switch)}
        reasons = [_ARGUMENTS[name].switch for name in plugins]
    # One engine trains, and nothing says which of two was meant.
    if len(reasons) > 1:
        raise ValueError(
            f"{' and '.join(reasons)} ask for different engines, and a model is trained by one. Leave all "
            "but one out."
        )
    parallelism = _mesh_sizes(parallelism_config, torch_tp_plugin)
    # An argument wins over the environment's sizes, too.
    given_mesh = parallelism_config is not None or torch_tp_plugin is not None
    if parallelism_config is None and (asked or outside is not None) and fsdp_plugin is None:
        parallelism = _without_shards(parallelism, reasons[0], torch_tp_plugin)
    elif parallelism is not None and given_mesh and not asked and outside is None:
        plugins, reasons = _under_given_mesh(parallelism, plugins, reasons)
    settings = outside if outside is not None else next(iter(plugins.values()), None)
    # Axes of shards mean FSDP. Version 2, as version 1 has no mesh.
    if parallelism is not None and parallelism.dp_shard_cp_dim_names and "fsdp_plugin" not in plugins:
        if settings is not None:
            raise ValueError(_instead_of_shards(parallelism, reasons[0], next(iter(plugins), None)))
        settings = plugins["fsdp_plugin"] = _class_of("fsdp_plugin")(fsdp_version=2)
    engine = _name_engine(settings, plugins, parallelism)
    _check_axes(engine, parallelism)
    # DeepSpeed's own file may set the precision and the number of steps.
    deepspeed = plugins.get("deepspeed_plugin")
    precision = precision_under(deepspeed, mixed_precision)
    return Choice(
        engine=engine,
        settings=settings,
        plugins=plugins,
        parallelism=parallelism,
        mixed_precision=precision,
        steps=steps_under(deepspeed),
        engine_reasons=(*reasons, *_mesh_reasons(parallelism_config, torch_tp_plugin, parallelism)),
        precision_reason=_precision_reason(mixed_precision, precision),
    )


def _class_of(argument: str) -> Any:
    # By path, so that no plugin's module (and what it imports) is loaded for engines that nobody asked for.
    module, _, name = _ARGUMENTS[argument].path.partition(":")
    return getattr(import_module(module), name)


def _checked(argument: str, value: Any) -> Any:
    """The plugin, or several of DeepSpeed's by name, as given.

    Raises:
        TypeError: If it is of another class.
    """
    kind, may_be_several = _class_of(argument), argument == "deepspeed_plugin"
    for item in value.values() if may_be_several and isinstance(value, dict) else [value]:
        if not isinstance(item, kind):
            several = ", or a dict of them" if may_be_several else ""
            raise TypeError(f"{argument} takes a {kind.__name__}{several}, not {item!r}.")
    return value


def _name_engine(
    settings: Any, plugins: Mapping[str, Any], parallelism: ParallelismConfig | None
) -> str | None:
    """The engine that settings ask for, or the axes of the mesh alone; None: the processes decide."""
    if "deepspeed_plugin" in plugins:
        return "deepspeed"
    if "megatron_lm_plugin" in plugins:
        return "megatron_lm"
    if "fsdp_plugin" in plugins:
        if settings.fsdp_version != 1:
            return "mesh"
        if parallelism is not None and parallelism.active_mesh_dims:
            raise ValueError(
                f"parallelism_config arranges {', '.join(parallelism.active_mesh_dims)}, and fsdp_version=1 "
                "has no mesh. Set FullyShardedDataParallelPlugin(fsdp_version=2)."
            )
        return "fsdp1"
    if settings is not None:
        return str(settings.engine)
    # Tensor parallelism alone has no plugin: its axis asks for the engine.
    return "mesh" if parallelism is not None and parallelism.tp_enabled else None


def _check_axes(engine: str | None, config: ParallelismConfig | None) -> None:
    if config is None or engine == "deepspeed":
        return
    if config.active_mesh_dims and engine in ("megatron_lm", "xla"):
        raise ValueError(
            f"parallelism_config asks for {', '.join(config.active_mesh_dims)}, and the {engine.upper()} "
            "engine arranges processes by itself. Leave it out; under Megatron-LM MegatronLMPlugin has "
            "tp_degree, pp_degree and context_parallel_size."
        )
    if config.sp_enabled:
        raise ValueError(
            f"sp_size={config.sp_size}: sequence parallelism is DeepSpeed's (Ulysses). Pass a "
            "DeepSpeedPlugin too (accel launch --use_deepspeed), or set cp_size."
        )


def _mesh_sizes(
    config: ParallelismConfig | None, tensor_plugin: Any, *, switched_on: bool | None = None
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


def _without_shards(
    config: ParallelismConfig | None, asked: str, tensor_plugin: Any
) -> ParallelismConfig | None:
    """The environment's mesh, unless FSDP shards over it and an argument asks for another engine."""
    if config is None or not config.dp_shard_cp_dim_names:
        return config
    warn(
        f"ACCELERATE_USE_PARALLELISM_CONFIG is ignored: the environment has {_shard_sizes(config)}, over "
        f"which FSDP shards models, and {asked} asks for another engine. Unset it, or leave {asked} out."
    )
    return _mesh_sizes(None, tensor_plugin, switched_on=False)


def _under_given_mesh(
    config: ParallelismConfig, plugins: Mapping[str, Any], reasons: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """The environment's plugin and its switch, unless its engine has no mesh such as an argument asks for."""
    name, plugin = next(iter(plugins.items()), (None, None))
    axes = config.dp_shard_cp_dim_names if name == "deepspeed_plugin" else config.active_mesh_dims
    # Sequence parallelism is DeepSpeed's alone: to drop an engine for it would leave none.
    if plugin is None or not axes or config.sp_enabled:
        return dict(plugins), reasons
    mesh = f"the mesh has {', '.join(axes)}"
    if name != "fsdp_plugin":
        warn(f"{reasons[0]} is ignored: {mesh}, which that engine does not train on.")
        return {}, []
    if plugin.fsdp_version != 1:
        return dict(plugins), reasons
    strategy = plugin.reshard_after_forward.name
    if strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        raise ValueError(
            f"{reasons[0]} asks for version 1 of FSDP with the strategy {strategy}: {mesh}, which version 1 "
            "does not train on, and version 2 has no such strategy. Set FSDP_SHARDING_STRATEGY to FULL_SHARD "
            "or SHARD_GRAD_OP, or leave the mesh out."
        )
    # Version 1 is also what stands where nobody chose a version.
    warn(f"FSDP version 2 takes the place of version 1: {mesh}, which version 1 does not train on.")
    return {name: type(plugin)(fsdp_version=2, reshard_after_forward=strategy == "FULL_SHARD")}, reasons


def _instead_of_shards(config: ParallelismConfig, asked: str, argument: str | None) -> str:
    instead = {
        "deepspeed_plugin": " (zero_stage says what is sharded over all processes, and sp_size splits "
        "sequences)",
        "megatron_lm_plugin": " (use_distributed_optimizer and context_parallel_size are its own settings)",
    }.get(str(argument), "")
    return (
        f"parallelism_config has {_shard_sizes(config)}, over which FSDP shards models, beside {asked}, "
        f"which asks for another engine. Leave it out{instead}, or train without {asked}."
    )


def _shard_sizes(config: ParallelismConfig) -> str:
    """The axes that FSDP shards over; processes that share sequences (cp) share parameters too."""
    names = config.dp_shard_cp_dim_names
    return " and ".join(f"{name}_size={getattr(config, f'{name}_size')}" for name in names)


def _mesh_reasons(config: Any, tensor_plugin: Any, decided: Any) -> list[str]:
    reasons = [] if tensor_plugin is None else ["torch_tp_plugin"]
    if config is not None:
        reasons.append("parallelism_config")
    elif decided is not None and tensor_plugin is None:
        reasons.append("ACCELERATE_USE_PARALLELISM_CONFIG")
    return reasons


def _precision_reason(given: Any, resolved: Any) -> str:
    if given is not None:
        return "mixed_precision"
    if resolved is not None:
        return "DeepSpeed's configuration"
    variable = "ACCELERATE_MIXED_PRECISION"
    return variable if env.is_set(variable) and env.get(variable) else "the default"
