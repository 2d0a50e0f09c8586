"""Arguments choose before the environment, and the environment before defaults; the reasons are recorded."""

from __future__ import annotations

import copy
import itertools
import operator
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
import torch

from accel import engines
from accel.accelerator import Accelerator
from accel.engines.deepspeed.plugin import DeepSpeedPlugin
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.engines.megatron.plugin import MegatronLMPlugin
from accel.engines.tp_plugin import TorchTensorParallelPlugin
from accel.state import AcceleratorState
from accel_state import train_plan
from accel_state.enums import DistributedType
from accel_state.env import patch_environment
from accel_state.handlers import GradientAccumulationPlugin, TorchDynamoPlugin
from accel_state.parallelism.config import ParallelismConfig
from accel_state.process.info import ProcessInfo
from accel_state.process.state import PartialState

make_train_plan = partial(train_plan.make_train_plan, plugin_class=engines.plugin_class)


def on(kind: DistributedType) -> ProcessInfo:
    """A process of a run of this kind."""
    return ProcessInfo(0, 1, 0, 1, torch.device("cpu"), None, kind)


PLUGINS = {
    "deepspeed_plugin": DeepSpeedPlugin,
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "megatron_lm_plugin": MegatronLMPlugin,
}
ENGINES = {"deepspeed_plugin": "deepspeed", "fsdp_plugin": "fsdp1", "megatron_lm_plugin": "megatron_lm"}
SWITCHES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")


@pytest.mark.parametrize("argument", PLUGINS)
@pytest.mark.parametrize("on", [on for n in range(4) for on in itertools.combinations(SWITCHES, n)])
def test_a_plugin_wins_over_every_switch_of_the_environment(monkeypatch, argument, on):
    plugin: Any = PLUGINS[argument]()
    for switch in on:
        monkeypatch.setenv(switch, "true")

    plan = make_train_plan(**{argument: plugin})

    assert plan.engine_settings is plugin
    assert plan.plugins == {argument: plugin}
    assert plan.engine == ENGINES[argument]
    assert plan.reasons["engine"] == (argument,)


@pytest.mark.parametrize(("switch", "argument"), [*zip(SWITCHES, ENGINES, strict=True)])
def test_without_an_argument_the_environment_chooses(monkeypatch, switch, argument):
    monkeypatch.setenv(switch, "true")

    plan = make_train_plan()

    assert isinstance(plan.engine_settings, PLUGINS[argument])
    assert [*plan.plugins] == [argument]
    assert plan.engine == ENGINES[argument]
    assert plan.reasons["engine"] == (switch,)


def test_without_either_nothing_is_chosen():
    plan = make_train_plan()

    assert (plan.engine, plan.engine_settings, plan.parallelism, plan.plugins) == (None, None, None, {})
    assert set(plan.reasons.values()) == {()}
    assert sorted(plan.reasons) == sorted(
        ["engine", "mesh", "mixed_precision", "fp8_backend", "accumulation", "dynamo", "device_placement"]
    )


def engine_of_the_argument() -> str:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    return Accelerator(cpu=True, fsdp_plugin=plugin).engine.name


def test_an_accelerator_has_the_engine_of_its_argument(world):
    names = world.run(engine_of_the_argument, size=1, env={"ACCELERATE_USE_DEEPSPEED": "true"})

    assert names == ["fsdp2"]


def test_a_mesh_of_the_environment_does_not_defeat_an_argument(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    assert make_train_plan().engine == "fsdp2"

    with pytest.warns(UserWarning, match="dp_shard_size=2, over which FSDP .* and deepspeed_plugin"):
        plan = make_train_plan(deepspeed_plugin=DeepSpeedPlugin())

    assert ([*plan.plugins], plan.parallelism) == (["deepspeed_plugin"], None)
    with pytest.raises(ValueError, match="parallelism_config has dp_shard_size=2"):
        make_train_plan(
            deepspeed_plugin=DeepSpeedPlugin(), parallelism_config=ParallelismConfig(dp_shard_size=2)
        )


@pytest.mark.parametrize(
    ("switch", "mesh", "reasons"),
    [
        ("ACCELERATE_USE_DEEPSPEED", {"dp_shard_size": 2}, ()),
        ("ACCELERATE_USE_MEGATRON_LM", {"dp_shard_size": 2}, ()),
        ("ACCELERATE_USE_MEGATRON_LM", {"tp_size": 2}, ()),
        ("ACCELERATE_USE_FSDP", {"tp_size": 2}, ("ACCELERATE_USE_FSDP",)),
    ],
)
def test_a_mesh_that_is_given_wins_over_a_switch_of_the_environment(monkeypatch, switch, mesh, reasons):
    monkeypatch.setenv(switch, "true")
    version = "FSDP version 2 takes the place of version 1"
    ignored = version if switch == "ACCELERATE_USE_FSDP" else f"{switch} is ignored"
    axis = next(iter(mesh)).removesuffix("_size")

    with pytest.warns(UserWarning, match=f"{ignored}: the mesh has {axis}"):
        plan = make_train_plan(parallelism_config=ParallelismConfig(**mesh))

    engine = "tp" if mesh == {"tp_size": 2} and not reasons else "fsdp2"
    assert (plan.engine, plan.reasons["engine"]) == (engine, (*reasons, "parallelism_config"))
    plugin = plan.plugins.get("fsdp_plugin")
    assert plugin is None or plugin.fsdp_version == 2


@pytest.mark.parametrize("variable", ["FSDP_RESHARD_AFTER_FORWARD", "FSDP_SHARDING_STRATEGY"])
@pytest.mark.parametrize(("strategy", "frees"), [("FULL_SHARD", True), ("SHARD_GRAD_OP", False)])
def test_the_strategy_of_version_1_is_that_of_version_2(monkeypatch, variable, strategy, frees):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv(variable, strategy)
    with pytest.warns(UserWarning, match="FSDP version 2 takes the place of version 1"):
        plan = make_train_plan(parallelism_config=ParallelismConfig(dp_shard_size=2))
    assert (plan.engine_settings.fsdp_version, plan.engine_settings.reshard_after_forward) == (2, frees)


def test_a_strategy_that_version_2_lacks_is_an_error(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "NO_SHARD")
    with pytest.raises(ValueError, match="with the strategy NO_SHARD: the mesh has dp_shard"):
        make_train_plan(parallelism_config=ParallelismConfig(dp_shard_size=2))


def test_no_engine_is_dropped_for_sequence_parallelism(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert make_train_plan(parallelism_config=ParallelismConfig(sp_size=2)).engine == "deepspeed"
    with pytest.raises(ValueError, match="dp_shard_size=2, over which FSDP shards"):
        make_train_plan(parallelism_config=ParallelismConfig(sp_size=2, dp_shard_size=2))


def test_a_switch_stands_next_to_a_mesh_that_its_engine_takes(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert make_train_plan(parallelism_config=ParallelismConfig(tp_size=2)).engine == "deepspeed"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    plan = make_train_plan(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    assert (plan.engine_settings.fsdp_version, plan.reasons["engine"][0]) == (2, "ACCELERATE_USE_FSDP")


@pytest.mark.parametrize(
    ("sizes", "fsdp", "reasons"),
    [
        ({}, False, ()),
        ({"dp_replicate_size": 2}, False, ()),
        ({"tp_size": 2}, False, ("parallelism_config",)),
        ({"dp_shard_size": 2}, False, ("parallelism_config",)),
        ({"dp_shard_size": 2}, True, ("fsdp_plugin",)),
    ],
)
def test_sizes_are_a_reason_for_the_engine_where_they_decide_it(sizes, fsdp, reasons):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
    plan = make_train_plan(parallelism_config=ParallelismConfig(**sizes), fsdp_plugin=plugin)
    assert (plan.reasons["mesh"], plan.reasons["engine"]) == (("parallelism_config",), reasons)


def test_the_processes_and_devices_are_reasons(monkeypatch):
    assert make_train_plan().on(on(DistributedType.NO)).reasons["engine"] == ("the number of processes",)
    plan = make_train_plan(fsdp_plugin=FullyShardedDataParallelPlugin())
    assert plan.on(on(DistributedType.XLA)).reasons["engine"] == ("the devices",)
    assert plan.on(on(DistributedType.NO)).reasons["engine"] == ("fsdp_plugin",)


def test_what_decides_is_named(monkeypatch):
    plan = make_train_plan(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2), device_placement=False)
    assert plan.reasons["engine"] == plan.reasons["mesh"] == ("torch_tp_plugin",)
    assert plan.reasons["device_placement"] == ("device_placement",)
    assert make_train_plan(dynamo_backend="inductor").reasons["dynamo"] == ("dynamo_backend",)
    assert make_train_plan(dynamo_plugin=TorchDynamoPlugin()).reasons["dynamo"] == ("dynamo_plugin",)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    assert make_train_plan().reasons["dynamo"] == ("ACCELERATE_DYNAMO_BACKEND",)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert make_train_plan().reasons["mesh"] == ("ACCELERATE_USE_PARALLELISM_CONFIG",)
    assert make_train_plan(mixed_precision="bf16").reasons["mixed_precision"] == ("mixed_precision",)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert make_train_plan().reasons["mixed_precision"] == ("ACCELERATE_MIXED_PRECISION",)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    half = DeepSpeedPlugin({"bf16": {"enabled": True}})
    assert make_train_plan(deepspeed_plugin=half).reasons["mixed_precision"] == ("DeepSpeed's configuration",)


@pytest.mark.parametrize("names", [*itertools.combinations(PLUGINS, 2)])
def test_settings_of_two_engines_are_rejected(names):
    with pytest.raises(ValueError, match=f"{names[0]} and {names[1]} request different engines"):
        make_train_plan(**{name: PLUGINS[name]() for name in names})


@pytest.mark.parametrize("argument", PLUGINS)
def test_settings_of_another_class_are_rejected(argument):
    with pytest.raises(TypeError, match=f"{argument} takes a {PLUGINS[argument].__name__}"):
        make_train_plan(**{argument: object()})


@pytest.mark.parametrize(
    ("argument", "instead"),
    [("deepspeed_plugin", "zero_stage"), ("megatron_lm_plugin", "context_parallel_size")],
)
def test_shards_of_the_mesh_next_to_another_engine_are_rejected_by_what_was_given(argument, instead):
    config = ParallelismConfig(dp_shard_size=2, cp_size=3)
    said = rf"dp_shard_size=2 and cp_size=3, .* and {argument} asks .*Leave it out \(.*{instead}"
    with pytest.raises(ValueError, match=said) as error:
        make_train_plan(parallelism_config=config, **{argument: PLUGINS[argument]()})
    assert "fsdp_plugin" not in str(error.value)


@pytest.mark.parametrize("kind", ["XLA", "MEGATRON_LM"])
def test_engines_that_arrange_processes_themselves_take_no_mesh(kind):
    plugin = MegatronLMPlugin() if kind == "MEGATRON_LM" else None
    config = ParallelismConfig(tp_size=2)
    with pytest.raises(ValueError, match=rf"asks for tp, and the {kind} engine arranges.*Leave it out"):
        make_train_plan(megatron_lm_plugin=plugin, parallelism_config=config).on(on(DistributedType.XLA))


@pytest.mark.parametrize("kind", list(DistributedType))
def test_without_settings_the_processes_make_train_plan(kind):
    expected = {"NO": "single", "XLA": "xla"}.get(kind.value, "ddp")
    assert make_train_plan().on(on(kind)).engine == expected


@dataclass
class Settings:
    """Of an engine that no package adds."""

    engine: ClassVar[str] = "elsewhere"


def test_settings_of_another_package_win_over_the_environment(monkeypatch):
    for switch in SWITCHES:
        monkeypatch.setenv(switch, "true")
    settings = Settings()

    plan = make_train_plan(external_settings=settings)

    assert (plan.engine, plan.engine_settings, plan.plugins) == ("elsewhere", settings, {})
    assert plan.reasons["engine"] == ("Settings",)
    assert plan.on(on(DistributedType.XLA)).engine == "elsewhere"
    with pytest.raises(ValueError, match="fsdp_plugin and Settings request different engines"):
        make_train_plan(external_settings=settings, fsdp_plugin=FullyShardedDataParallelPlugin())
    with pytest.raises(TypeError, match=r"kwargs_handlers got Settings.*settings of an engine that another"):
        Accelerator(cpu=True, kwargs_handlers=[settings])


def test_a_package_may_not_name_its_engine_as_another_one(monkeypatch):
    point = EntryPoint("ddp", "elsewhere:Engine", engines.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        engines, "entry_points", lambda group: [point] if group == engines.ENTRY_POINT_GROUP else []
    )
    engines.entry_point_engines.cache_clear()
    try:
        with pytest.raises(ValueError, match="elsewhere adds an engine called 'ddp'"):
            engines.entry_point_engines()
    finally:
        engines.entry_point_engines.cache_clear()


def test_accumulation_from_the_launcher_comes_before_the_argument():
    plugin, of_three = GradientAccumulationPlugin(), GradientAccumulationPlugin(num_steps=3)
    with patch_environment(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4"):
        assert make_train_plan(gradient_accumulation_steps=2).accumulation.num_steps == 4
        assert make_train_plan(gradient_accumulation_plugin=plugin).accumulation.num_steps == 4
        assert make_train_plan(gradient_accumulation_plugin=of_three).accumulation.num_steps == 3
    assert make_train_plan(gradient_accumulation_steps=2).accumulation.num_steps == 2
    assert make_train_plan(gradient_accumulation_plugin=plugin).accumulation.num_steps == 1


@pytest.mark.parametrize("plugin", [None, GradientAccumulationPlugin()])
def test_no_steps_at_all_are_an_error(monkeypatch, plugin):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "0")
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 0; it takes"):
        make_train_plan(gradient_accumulation_plugin=plugin)


def test_nothing_changes_a_plan():
    accumulation = GradientAccumulationPlugin(num_steps=2)
    plan: Any = make_train_plan(gradient_accumulation_plugin=accumulation).on(on(DistributedType.NO))
    accumulation.num_steps = 5
    assert plan.accumulation.num_steps == 2
    for name in ("plugins", "reasons", "mesh"):
        with pytest.raises(TypeError, match="read-only"):
            getattr(plan, name)["engine"] = "other"
    with pytest.raises(FrozenInstanceError):
        plan.engine = "other"


def test_a_plan_is_copied_and_pickled():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plan = make_train_plan(fsdp_plugin=plugin).on(on(DistributedType.MULTI_CPU))
    for again in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert again == plan
        with pytest.raises(TypeError, match="read-only"):
            again.reasons["engine"] = ()
    as_dict = asdict(plan)
    assert (as_dict["engine"], as_dict["mesh"]) == ("fsdp2", {"dp_shard": 1})
    assert as_dict["reasons"] == plan.reasons
    assert as_dict["plugins"] == {"fsdp_plugin": asdict(plugin)}


CHANGES: dict[str, Callable[[Any], object]] = {
    "set": lambda reasons: reasons.__setitem__("engine", ()),
    "delete": lambda reasons: reasons.__delitem__("engine"),
    "or": lambda reasons: operator.ior(reasons, {"engine": ()}),
    "clear": lambda reasons: reasons.clear(),
    "pop": lambda reasons: reasons.pop("engine"),
    "popitem": lambda reasons: reasons.popitem(),
    "setdefault": lambda reasons: reasons.setdefault("other", ()),
    "update": lambda reasons: reasons.update(engine=()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_dicts_of_a_plan_are_read_only(change):
    passed = {"engine": ("an argument",)}
    plan = replace(make_train_plan(), reasons=passed)
    with pytest.raises(TypeError, match="The dicts of a TrainPlan are read-only"):
        CHANGES[change](plan.reasons)
    assert plan.reasons == {"engine": ("an argument",)}

    passed.clear()
    assert plan.reasons["engine"] == ("an argument",)


FSDP2 = partial(FullyShardedDataParallelPlugin, fsdp_version=2)


@pytest.mark.parametrize(
    ("sizes", "plugin", "world_size", "engine", "mesh"),
    [
        ({}, FSDP2, 3, "fsdp2", {"dp_shard": 3}),
        ({"dp_shard_size": 2}, None, 2, "fsdp2", {"dp_shard": 2}),
        ({"dp_replicate_size": 2}, FSDP2, 2, "fsdp2", {"dp_replicate": 2, "dp_shard": 1}),
        ({"dp_replicate_size": 2}, None, 2, "ddp", {"dp_replicate": 2}),
        (
            {"dp_replicate_size": 2, "tp_size": 2},
            None,
            4,
            "ddp x tp",
            {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
        ),
        (
            {"dp_replicate_size": 2, "tp_size": 2},
            FSDP2,
            4,
            "fsdp2 x tp",
            {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
        ),
        (
            {"dp_shard_size": 2, "cp_size": 2, "tp_size": 2},
            None,
            8,
            "fsdp2 x cp x tp",
            {"dp_shard": 2, "cp": 2, "tp": 2},
        ),
        ({"cp_size": 2}, None, 2, "fsdp2 x cp", {"cp": 2}),
        ({"tp_size": 2}, None, 2, "tp", {"tp": 2}),
        ({"tp_size": 2}, DeepSpeedPlugin, 4, "deepspeed", {"tp": 2}),
    ],
)
def test_the_plan_has_all_axes_and_the_engines_name(sizes, plugin, world_size, engine, mesh):
    process = replace(on(DistributedType.MULTI_CPU), world_size=world_size)
    argument = "deepspeed_plugin" if plugin is DeepSpeedPlugin else "fsdp_plugin"
    config = ParallelismConfig(**sizes) if sizes else None
    plan = make_train_plan(parallelism_config=config, **{argument: None if plugin is None else plugin()})
    plan = plan.on(process)
    assert (plan.engine, [*plan.mesh.items()]) == (engine, [*mesh.items()])


def test_weights_that_are_split_over_all_processes_leave_nothing_to_shard():
    plan = make_train_plan(fsdp_plugin=FSDP2(), parallelism_config=ParallelismConfig(tp_size=2))
    process = replace(on(DistributedType.MULTI_CPU), world_size=2)
    with pytest.raises(ValueError, match="tp_size=2 on 2 processes leaves nothing to shard over"):
        plan.on(process)
    with pytest.raises(ValueError, match=r"tp\(2\) = 2, but 4 processes are running"):
        plan.on(replace(process, world_size=4))


def planned_and_real(**sizes: int) -> Any:
    config = ParallelismConfig(**sizes) if sizes else None
    plugin = None if "tp_size" in sizes else FSDP2()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
    mesh = accelerator.torch_device_mesh
    axes = {name: mesh[name].size() for name in mesh.mesh_dim_names}
    plan = accelerator.plan
    return (plan.engine, dict(plan.mesh)), (accelerator.engine.name, axes)


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}, {"dp_shard_size": 2}])
def test_the_engine_has_the_name_and_the_mesh_of_its_plan(world, sizes):
    for planned, real in world.run(planned_and_real, **sizes, size=2):
        assert planned == real


MESH_SWITCH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
ENVIRONMENTS: list[dict[str, str]] = [
    {},
    *({switch: "true"} for switch in SWITCHES),
    {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    MESH_SWITCH,
    {**MESH_SWITCH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
    {**MESH_SWITCH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "FSDP_VERSION": "2"},
    {**MESH_SWITCH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"},
    {
        **MESH_SWITCH,
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
    },
    {**MESH_SWITCH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"},
    {**MESH_SWITCH, "PARALLELISM_CONFIG_TP_SIZE": "2"},
    {**MESH_SWITCH, "PARALLELISM_CONFIG_TP_SIZE": "2", "ACCELERATE_USE_MEGATRON_LM": "true"},
    {**MESH_SWITCH, "PARALLELISM_CONFIG_SP_SIZE": "2"},
    {**MESH_SWITCH, "PARALLELISM_CONFIG_SP_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"},
    {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "inductor"},
    {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"},
    {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "0"},
    {"ACCELERATE_DYNAMO_BACKEND": "nonsense"},
    {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE"},
    {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "true"},
]


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_state_alone_decides_as_an_accelerator_does(monkeypatch, environment):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for name, text in environment.items():
        monkeypatch.setenv(name, text)

    def decided(make: Callable[[], Any]) -> Any:
        try:
            plan = make()
        except ValueError as error:
            return str(error)
        shown = (plan.engine, plan.distributed_type, plan.mixed_precision, plan.fp8_backend, plan.mesh)
        return *shown, plan.accumulation, plan.dynamo, plan.parallelism, plan.reasons, [*plan.plugins]

    process = PartialState().process
    alone = decided(lambda: AcceleratorState().plan)
    assert alone == decided(lambda: make_train_plan().on(process))


@pytest.mark.usefixtures("fresh_state")
def test_without_accel_the_version_of_fsdp_is_left_open(monkeypatch):
    monkeypatch.setattr(train_plan, "_registered_plugin_class", None)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    plan = AcceleratorState().plan
    assert (plan.engine, plan.distributed_type) == (None, DistributedType.FSDP)


def test_dynamo_backend_by_name_by_plugin_and_not_both():
    assert make_train_plan(dynamo_backend="inductor").dynamo.backend == "INDUCTOR"
    assert make_train_plan().dynamo.backend == "NO"
    with pytest.raises(ValueError, match="pass one"):
        make_train_plan(dynamo_backend="inductor", dynamo_plugin=TorchDynamoPlugin(backend="inductor"))
    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    assert make_train_plan(dynamo_plugin=plugin).dynamo is plugin


def test_an_engine_with_a_member_of_an_old_name_is_rejected(monkeypatch):
    module = types.ModuleType("old_engine")
    module.Old = type("Old", (engines.Engine,), {"wrap_model": None})
    monkeypatch.setitem(sys.modules, "old_engine", module)
    monkeypatch.setitem(engines.ENGINES, "old", engines.EngineEntry("old_engine:Old", ""))
    with pytest.raises(TypeError, match=r"the old engine has wrap_model.*it is setup_model now"):
        engines.find_engine("old")
