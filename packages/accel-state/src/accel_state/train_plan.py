"""How one Accelerator trains: decided once, from arguments before environment before defaults, with reasons.

    plan = make_train_plan(fsdp_plugin=plugin)  # needs no process group
    plan = plan.on(process)                     # adds what depends on the device and the number of processes
    plan.engine, plan.reasons["engine"]         # "fsdp1", ("fsdp_plugin",)

Nothing else decides: the Accelerator hands the plan down, and `AcceleratorState` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from accel_state import env
from accel_state.devices.probes import is_cuda_available
from accel_state.devices.table import device_spec
from accel_state.enums import DistributedType, PrecisionType
from accel_state.handlers import GradientAccumulationPlugin, TorchDynamoPlugin
from accel_state.imports.available import is_transformer_engine_available
from accel_state.logging.warning import warn
from accel_state.parallelism.config import ParallelismConfig

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo

# Returns the class of an argument's plugins, and imports it on first use.
_PluginClass = Callable[[str], Any]

# Set when accel.state is imported: this package must not import one above it.
_registered_plugin_class: _PluginClass | None = None


def register_plugin_class(plugin_class: _PluginClass) -> None:
    """Register what makes the plugins that the environment requests, where `make_train_plan` gets none.

    Args:
        plugin_class: Returns the class of an argument's plugins.
    """
    global _registered_plugin_class
    _registered_plugin_class = plugin_class


@dataclass(frozen=True)
class _EngineArgument:
    """An argument that takes the plugin of an engine."""

    distributed_type: DistributedType
    switch: str  # the variable that selects the engine with a plugin from the environment


# The arguments that choose an engine.
_ENGINE_ARGUMENTS = {
    "deepspeed_plugin": _EngineArgument(DistributedType.DEEPSPEED, "ACCELERATE_USE_DEEPSPEED"),
    "fsdp_plugin": _EngineArgument(DistributedType.FSDP, "ACCELERATE_USE_FSDP"),
    "megatron_lm_plugin": _EngineArgument(DistributedType.MEGATRON_LM, "ACCELERATE_USE_MEGATRON_LM"),
}


class _ReadOnlyDict(dict[str, Any]):
    """A dict that cannot be changed. Unlike a MappingProxyType, it can be pickled and deep-copied."""

    def _reject(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("The dicts of a TrainPlan are read-only.")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _reject

    def __reduce__(self) -> tuple[Any, ...]:
        # By default pickle and copy would set the items one by one.
        return type(self), (dict(self),)


@dataclass(frozen=True)
class TrainPlan:
    """The engine, precision, mesh, plugins and accumulation of an Accelerator, and the reasons for them.

    It says what was decided at the start: what is assigned to the Accelerator later, such as
    `gradient_accumulation_steps`, does not change it. The plugins are the objects that were passed.

    Attributes:
        engine: The engine's name, such as "ddp"; None until `on`, where the number of processes decides. `on`
            completes that of a mesh by its axes, such as "fsdp2 x tp". It stays None where the environment
            requests FSDP and accel, which has the plugin with the version, is not imported.
        distributed_type: The engine as `Accelerator.distributed_type` names it; None until `on`, likewise.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        plugins: The plugins by their argument; at most one of them chooses the engine.
        engine_settings: What chose the engine: a plugin, a dict of DeepSpeed's, or the settings of an engine
            of another package; None if nothing did.
        torch_tp_plugin: The older way to give tp_size, as it was passed.
        parallelism: The requested sizes of the mesh's axes; None if none were requested.
        dynamo: How models are compiled.
        accumulation: Micro-batches per optimizer step, and what goes with them.
        device_placement: Whether prepared objects and batches go to the device.
        reasons: The arguments and variables that decided "engine", "mesh", "mixed_precision", "fp8_backend",
            "accumulation", "dynamo" and "device_placement"; an empty tuple where the default did.
        fp8_backend: The library that computes in fp8: "AO", "TE" or "MSAMP"; None in other precisions, and
            until `on`, where what is installed decides.
        mesh: The sizes of the mesh's axes that the engine trains on, outermost first; empty until `on`, and
            without a mesh.
    """

    engine: str | None
    distributed_type: DistributedType | None
    mixed_precision: str
    plugins: Mapping[str, Any]
    engine_settings: Any
    torch_tp_plugin: Any
    parallelism: ParallelismConfig | None
    dynamo: TorchDynamoPlugin
    accumulation: GradientAccumulationPlugin
    device_placement: bool
    reasons: Mapping[str, tuple[str, ...]]
    fp8_backend: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("plugins", "reasons", "mesh"):
            object.__setattr__(self, name, _ReadOnlyDict(getattr(self, name)))

    def on(self, process: ProcessInfo) -> TrainPlan:
        """Return the plan for this process, with an engine and the axes of its mesh.

        Raises:
            ValueError: If its device lacks the precision, or its engine takes no such mesh.
        """
        _check_precision(self.mixed_precision, process)
        kind = process.distributed_type
        engine, distributed_type = self.engine, self.distributed_type or kind
        reasons = dict(self.reasons)
        is_external = self.engine_settings is not None and not self.plugins
        # XLA shards by itself: a plugin says how, and does not make it another engine.
        if kind == DistributedType.XLA and not is_external:
            engine, distributed_type, reasons["engine"] = "xla", kind, ("the devices",)
        if engine is None and not self.plugins:
            engine = "single" if kind == DistributedType.NO else "ddp"
            reasons["engine"] = ("the number of processes",)
        _check_axes(engine, self.parallelism)
        mesh = _mesh_axes(self, engine, process.world_size)
        if engine in ("fsdp2", "tp"):
            engine = _mesh_engine_name(mesh, is_chosen=self.engine_settings is not None)
        fp8_backend = self.fp8_backend
        if self.mixed_precision == PrecisionType.FP8 and fp8_backend is None:
            # Transformer Engine's kernels are for NVIDIA GPUs alone.
            fp8_backend = "TE" if is_cuda_available() and is_transformer_engine_available() else "AO"
        return replace(
            self,
            engine=engine,
            distributed_type=distributed_type,
            reasons=reasons,
            fp8_backend=fp8_backend,
            mesh=mesh,
        )


def make_train_plan(
    *,
    deepspeed_plugin: Any = None,
    deepspeed_plugins: Any = None,
    fsdp_plugin: Any = None,
    megatron_lm_plugin: Any = None,
    torch_tp_plugin: Any = None,
    parallelism_config: ParallelismConfig | None = None,
    mixed_precision: PrecisionType | str | None = None,
    dynamo_backend: Any = None,
    dynamo_plugin: TorchDynamoPlugin | None = None,
    gradient_accumulation_steps: int = 1,
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
    device_placement: bool = True,
    fp8_recipe: Any = None,
    external_settings: Any = None,
    plugin_class: _PluginClass | None = None,
) -> TrainPlan:
    """Decide how to train, from arguments, the environment and defaults.

    A plugin that is passed chooses its engine, whatever the environment's switches say.

    Args:
        deepspeed_plugin: As the Accelerator's; so are all but the last three.
        deepspeed_plugins: Several by name.
        fsdp_plugin: A FullyShardedDataParallelPlugin.
        megatron_lm_plugin: A MegatronLMPlugin.
        torch_tp_plugin: A TorchTensorParallelPlugin.
        parallelism_config: The sizes of the mesh's axes.
        mixed_precision: The precision.
        dynamo_backend: A backend of torch.compile by name.
        dynamo_plugin: The options of torch.compile in full.
        gradient_accumulation_steps: Micro-batches per optimizer step; 1 counts as not passed.
        gradient_accumulation_plugin: The accumulation settings in full.
        device_placement: Whether prepared objects and batches go to the device.
        fp8_recipe: The settings of the library that computes in fp8, which have its name as `library`.
        external_settings: The settings of an engine of another package, which have its name as `engine`.
        plugin_class: Returns the class of an argument's plugins, which checks them and makes those that the
            environment requests. Without it, the registered one makes them, and nothing checks them.

    Raises:
        TypeError: If a plugin is of another engine's class.
        ValueError: If a value is unknown, or arguments or variables contradict each other.
    """
    if deepspeed_plugin is not None and deepspeed_plugins is not None:
        raise ValueError("Accelerator got deepspeed_plugin and deepspeed_plugins: pass one of them.")
    passed = {
        "deepspeed_plugin": deepspeed_plugin if deepspeed_plugins is None else deepspeed_plugins,
        "fsdp_plugin": fsdp_plugin,
        "megatron_lm_plugin": megatron_lm_plugin,
        "torch_tp_plugin": torch_tp_plugin,
    }
    if plugin_class is not None:
        _check_plugins(passed, plugin_class)
    plugins, parallelism, engine_reasons, mesh_reasons = _choose_plugin(
        {name: passed[name] for name in _ENGINE_ARGUMENTS if passed[name] is not None},
        torch_tp_plugin,
        parallelism_config,
        external_settings,
        plugin_class or _registered_plugin_class or (lambda argument: lambda **settings: None),
    )
    engine = _name_engine(plugins, parallelism, external_settings)
    _check_axes(engine, parallelism)
    # DeepSpeed's own file may set the precision and the number of steps.
    deepspeed = _first(plugins.get("deepspeed_plugin"))
    precision, precision_reason = _resolve_precision(mixed_precision, deepspeed)
    accumulation, accumulation_reason = _resolve_accumulation(
        gradient_accumulation_steps, gradient_accumulation_plugin, deepspeed
    )
    fp8_backend, fp8_reason = _resolve_fp8_backend(precision, fp8_recipe)
    dynamo, dynamo_reason = _resolve_dynamo(dynamo_backend, dynamo_plugin)
    return TrainPlan(
        engine=engine,
        distributed_type=next((_ENGINE_ARGUMENTS[name].distributed_type for name in plugins), None),
        mixed_precision=precision,
        plugins=plugins,
        engine_settings=external_settings
        if external_settings is not None
        else next(iter(plugins.values()), None),
        torch_tp_plugin=torch_tp_plugin,
        parallelism=parallelism,
        dynamo=dynamo,
        accumulation=accumulation,
        device_placement=device_placement,
        reasons={
            "engine": tuple(engine_reasons),
            "mesh": tuple(mesh_reasons),
            "mixed_precision": precision_reason,
            "fp8_backend": fp8_reason,
            "accumulation": accumulation_reason,
            "dynamo": dynamo_reason,
            "device_placement": () if device_placement else ("device_placement",),
        },
        fp8_backend=fp8_backend,
    )


# The engine


def _check_plugins(passed: Mapping[str, Any], plugin_class: _PluginClass) -> None:
    for argument, value in passed.items():
        if value is None:
            continue
        kind, may_be_dict = plugin_class(argument), argument == "deepspeed_plugin"
        for plugin in value.values() if may_be_dict and isinstance(value, dict) else [value]:
            if not isinstance(plugin, kind):
                or_dict = ", or a dict of them" if may_be_dict else ""
                raise TypeError(f"{argument} takes a {kind.__name__}{or_dict}, not {plugin!r}.")


def _choose_plugin(
    plugins: dict[str, Any],
    tensor_plugin: Any,
    parallelism_config: ParallelismConfig | None,
    external_settings: Any,
    plugin_class: _PluginClass,
) -> tuple[dict[str, Any], ParallelismConfig | None, list[str], list[str]]:
    """The one plugin that chooses the engine, if any, the mesh, the engine's reasons and the mesh's."""
    reasons = [*plugins, *([] if external_settings is None else [type(external_settings).__name__])]
    is_passed = bool(reasons)
    # An argument wins over every switch: a program may be started with those of another one.
    if not is_passed:
        plugins = {
            name: plugin_class(name)() for name, item in _ENGINE_ARGUMENTS.items() if env.get(item.switch)
        }
        reasons = [_ENGINE_ARGUMENTS[name].switch for name in plugins]
    if len(reasons) > 1:
        raise ValueError(
            f"{' and '.join(reasons)} request different engines, and a model is trained by one. Leave all "
            "but one out."
        )
    parallelism = _mesh_sizes(parallelism_config, tensor_plugin)
    # An argument wins over the environment's sizes, too.
    if is_passed and parallelism_config is None and "fsdp_plugin" not in plugins:
        parallelism = _drop_env_mesh(parallelism, reasons[0], tensor_plugin)
    mesh_reasons = _mesh_reasons(parallelism_config, tensor_plugin, parallelism)
    if not is_passed and (parallelism_config is not None or tensor_plugin is not None):
        plugins, reasons = _reconcile_env_plugin(parallelism, plugins, reasons, mesh_reasons)
    if parallelism is None:
        return plugins, parallelism, reasons, mesh_reasons
    # Axes of shards mean FSDP. Version 2, as version 1 has no mesh.
    if parallelism.dp_shard_cp_dim_names and "fsdp_plugin" not in plugins:
        if reasons:
            raise ValueError(_fsdp_conflict_message(parallelism, reasons[0], next(iter(plugins), None)))
        plugins = {"fsdp_plugin": plugin_class("fsdp_plugin")(fsdp_version=2)}
    # Without a plugin the axes of shards and of split weights decide.
    if not reasons and (plugins or parallelism.tp_enabled):
        reasons = mesh_reasons
    return plugins, parallelism, reasons, mesh_reasons


def _first(plugins: Any) -> Any:
    """The first of several DeepSpeed plugins."""
    if not isinstance(plugins, dict):
        return plugins
    if not plugins:
        raise ValueError("deepspeed_plugin is an empty dictionary; pass at least one plugin, or None.")
    return next(iter(plugins.values()))


def _name_engine(
    plugins: Mapping[str, Any], parallelism: ParallelismConfig | None, external_settings: Any
) -> str | None:
    """The engine of the settings, or of the mesh's axes alone; None: the number of processes decides."""
    if "deepspeed_plugin" in plugins:
        return "deepspeed"
    if "megatron_lm_plugin" in plugins:
        return "megatron_lm"
    if "fsdp_plugin" in plugins:
        if plugins["fsdp_plugin"] is None:
            return None  # nobody here could make it, and it has the version
        if getattr(plugins["fsdp_plugin"], "fsdp_version", 1) != 1:
            return "fsdp2"
        if parallelism is not None and parallelism.active_mesh_dims:
            raise ValueError(
                f"parallelism_config arranges {', '.join(parallelism.active_mesh_dims)}, and fsdp_version=1 "
                "has no mesh. Set FullyShardedDataParallelPlugin(fsdp_version=2)."
            )
        return "fsdp1"
    if external_settings is not None:
        return str(external_settings.engine)
    # Tensor parallelism alone has no plugin: its axis selects the engine.
    return "tp" if parallelism is not None and parallelism.tp_enabled else None


# The mesh


def _mesh_sizes(
    config: ParallelismConfig | None, tensor_plugin: Any, *, reads_environment: bool | None = None
) -> ParallelismConfig | None:
    """The sizes that were passed, or those of the environment where the launcher says to use them."""
    if reads_environment is None:
        reads_environment = bool(env.get("ACCELERATE_USE_PARALLELISM_CONFIG"))
    if config is None and reads_environment:
        config = ParallelismConfig()
    return config if tensor_plugin is None else tensor_plugin.complete(config)


def _drop_env_mesh(
    config: ParallelismConfig | None, reason: str, tensor_plugin: Any
) -> ParallelismConfig | None:
    """The environment's mesh, unless FSDP shards over it and an argument selects another engine."""
    if config is None or not config.dp_shard_cp_dim_names:
        return config
    warn(
        f"ACCELERATE_USE_PARALLELISM_CONFIG is ignored: the environment has {_shard_sizes(config)}, over "
        f"which FSDP shards models, and {reason} asks for another engine. Unset it, or leave {reason} out."
    )
    return _mesh_sizes(None, tensor_plugin, reads_environment=False)


def _reconcile_env_plugin(
    config: ParallelismConfig | None, plugins: dict[str, Any], reasons: list[str], mesh_reasons: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """The environment's plugin and its switch, unless its engine takes no mesh such as an argument has."""
    name, plugin = next(iter(plugins.items()), (None, None))
    if config is None or plugin is None:
        return plugins, reasons
    axes = config.dp_shard_cp_dim_names if name == "deepspeed_plugin" else config.active_mesh_dims
    # Sequence parallelism is DeepSpeed's alone: to drop an engine for it would leave none.
    if not axes or config.sp_enabled:
        return plugins, reasons
    mesh = f"the mesh has {', '.join(axes)}"
    if name != "fsdp_plugin":
        warn(f"{reasons[0]} is ignored: {mesh}, which that engine does not train on.")
        return {}, []
    if plugin.fsdp_version != 1:
        return plugins, reasons
    strategy = plugin.reshard_after_forward.name
    if strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        raise ValueError(
            f"{reasons[0]} asks for version 1 of FSDP with the strategy {strategy}: {mesh}, which version 1 "
            "does not train on, and version 2 has no such strategy. Set FSDP_SHARDING_STRATEGY to FULL_SHARD "
            "or SHARD_GRAD_OP, or leave the mesh out."
        )
    # Version 1 is also the default where no version was chosen.
    warn(f"FSDP version 2 takes the place of version 1: {mesh}, which version 1 does not train on.")
    plugin = type(plugin)(fsdp_version=2, reshard_after_forward=strategy == "FULL_SHARD")
    return {name: plugin}, [*reasons, *mesh_reasons]


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


def _mesh_axes(plan: TrainPlan, engine: str | None, world_size: int) -> dict[str, int]:
    """The axes that the engine trains on, with their sizes."""
    config = plan.parallelism
    active = {} if config is None else {n: getattr(config, f"{n}_size") for n in config.active_mesh_dims}
    if engine not in ("fsdp2", "tp"):
        return active
    if config is None or not active:
        return {"dp_shard": world_size}
    if config.dp_shard_cp_dim_names:
        return active
    if config.dp_replicate_enabled:  # replicas without shards, on one mesh with the tensor-parallel axis
        return {"dp_replicate": active.pop("dp_replicate"), "dp_shard": 1, **active}
    if plan.engine_settings is not None:
        config.validate(world_size)  # its message comes first
        raise ValueError(
            f"fsdp_plugin with tp_size={config.tp_size} on {world_size} processes leaves nothing to shard "
            "over. Give dp_shard_size (and that many times the processes), or leave fsdp_plugin out."
        )
    return active


def _mesh_engine_name(mesh: Mapping[str, int], is_chosen: bool) -> str:
    """What the axes do, as `Engine.name` says it: "fsdp2", "fsdp2 x tp", "tp"."""
    # Replicas without requested shards are DDP to the user, whatever implements it.
    is_plain = "dp_replicate" in mesh and mesh.get("dp_shard") == 1 and not is_chosen
    data = [] if [*mesh] == ["tp"] else ["ddp" if is_plain else "fsdp2"]
    return " x ".join([*data, *(axis for axis in ("cp", "tp") if axis in mesh)])


def _fsdp_conflict_message(config: ParallelismConfig, reason: str, argument: str | None) -> str:
    instead = {
        "deepspeed_plugin": " (zero_stage says what is sharded over all processes, and sp_size splits "
        "sequences)",
        "megatron_lm_plugin": " (use_distributed_optimizer and context_parallel_size are its own settings)",
    }.get(str(argument), "")
    return (
        f"parallelism_config has {_shard_sizes(config)}, over which FSDP shards models, and {reason} asks "
        f"for another engine. Leave it out{instead}, or train without {reason}."
    )


def _shard_sizes(config: ParallelismConfig) -> str:
    """The axes that FSDP shards over; processes that split sequences (cp) hold shards of parameters too."""
    names = config.dp_shard_cp_dim_names
    return " and ".join(f"{name}_size={getattr(config, f'{name}_size')}" for name in names)


def _mesh_reasons(config: Any, tensor_plugin: Any, decided: Any) -> list[str]:
    reasons = [] if tensor_plugin is None else ["torch_tp_plugin"]
    if config is not None:
        reasons.append("parallelism_config")
    elif decided is not None and tensor_plugin is None:
        reasons.append("ACCELERATE_USE_PARALLELISM_CONFIG")
    return reasons


# Precision, accumulation, compilation


def _resolve_precision(value: Any, deepspeed: Any) -> tuple[str, tuple[str, ...]]:
    if value is not None:
        return parse_precision(value), ("mixed_precision",)
    variable = "ACCELERATE_MIXED_PRECISION"
    named = env.get(variable)
    # A launcher writes "no" where nothing was requested.
    configured = None if deepspeed is None or named != "no" else deepspeed.configured_precision()
    if configured is not None:
        return configured, ("DeepSpeed's configuration",)
    return named, (variable,) if env.is_set(variable) and named else ()


def parse_precision(value: PrecisionType | str) -> str:
    """Return a precision's name.

    Raises:
        ValueError: If it is unknown; the message lists those there are.
    """
    try:
        return str(PrecisionType(value))
    except ValueError:
        raise ValueError(
            f"mixed_precision={value!r} is unknown; allowed: {', '.join(PrecisionType.list())}."
        ) from None


def _check_precision(precision: str, process: ProcessInfo) -> None:
    # fp8 is not autocast's: the library that runs it says whether the hardware will do.
    hardware = device_spec(process.device)
    # "no" needs nothing.
    if precision not in (PrecisionType.BF16, PrecisionType.FP16) or hardware.has_autocast(precision):
        return
    # What the type has, and this very device too: not every GPU computes in bf16.
    others = [other for other in sorted(hardware.autocast_dtypes) if hardware.has_autocast(other)]
    raise ValueError(
        f"mixed_precision={precision!r} is not available on {process.device}; allowed here: "
        f"{', '.join(['no', *others])}. Pass one of these to the Accelerator, to ACCELERATE_MIXED_PRECISION "
        "or to accel launch --mixed_precision."
    )


def _resolve_fp8_backend(precision: str, recipe: Any) -> tuple[str | None, tuple[str, ...]]:
    """The library of a recipe, or of the environment; None where what is installed decides."""
    if precision != PrecisionType.FP8:
        return None, ()
    variable = "ACCELERATE_FP8_BACKEND"
    named: str | None = env.get(variable)
    if recipe is None:
        return named, () if named is None else (variable,)
    library: str = recipe.library
    if named not in (None, library):
        warn(f"{variable}={named} is ignored: kwargs_handlers has {type(recipe).__name__}.")
    return library, (type(recipe).__name__,)


def _resolve_accumulation(
    steps: int, plugin: GradientAccumulationPlugin | None, deepspeed: Any
) -> tuple[GradientAccumulationPlugin, tuple[str, ...]]:
    """The settings, and what decided the number: the launcher's flag wins over the argument."""
    variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    if plugin is not None:
        if steps != 1:
            raise ValueError(
                f"Accelerator got gradient_accumulation_steps={steps} and a gradient_accumulation_plugin: "
                f"pass one of them (the plugin's num_steps is the same setting)."
            )
        if plugin.num_steps is not None:
            return replace(plugin), ("gradient_accumulation_plugin",)  # a copy: the user may change theirs
        if not env.is_set(variable):
            return replace(plugin, num_steps=1), ()
        return replace(plugin, num_steps=check_accumulation_steps(env.get(variable))), (variable,)
    # As documented: the launcher's flag changes scripts that pass a number.
    if env.is_set(variable):
        return GradientAccumulationPlugin(num_steps=check_accumulation_steps(env.get(variable))), (variable,)
    reason: tuple[str, ...] = () if steps == 1 else ("gradient_accumulation_steps",)
    configured = None if deepspeed is None else deepspeed.configured_steps()
    # 1 is the argument's default, and so counts as not passed.
    if steps == 1 and configured is not None:
        steps, reason = configured, ("DeepSpeed's configuration",)
    return GradientAccumulationPlugin(num_steps=check_accumulation_steps(steps)), reason


def check_accumulation_steps(steps: Any) -> int:
    """Return the number of accumulation steps.

    Raises:
        ValueError: If it is not a positive integer.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:  # True is an int
        raise ValueError(f"gradient_accumulation_steps is {steps!r}; it takes an integer of at least 1.")
    return steps


def _resolve_dynamo(
    backend: Any, plugin: TorchDynamoPlugin | None
) -> tuple[TorchDynamoPlugin, tuple[str, ...]]:
    if backend is not None and plugin is not None:
        raise ValueError("Accelerator got dynamo_backend and dynamo_plugin: pass one of them.")
    if plugin is not None:
        return plugin, ("dynamo_plugin",)
    if backend is not None:
        return TorchDynamoPlugin(backend=backend), ("dynamo_backend",)
    variable = "ACCELERATE_DYNAMO_BACKEND"
    return TorchDynamoPlugin(), (variable,) if env.is_set(variable) else ()
