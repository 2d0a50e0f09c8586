"""Arguments choose before the environment, and the environment before defaults; the reasons are told."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest

from accel import engines
from accel.accelerator import Accelerator
from accel.engines.choice import choose
from accel.engines.deepspeed.plugin import DeepSpeedPlugin
from accel.engines.megatron.plugin import MegatronLMPlugin
from accel.engines.mesh.tensor.plugin import TorchTensorParallelPlugin
from accel.engines.sharded.plugin import FullyShardedDataParallelPlugin
from accel_state.enums import DistributedType
from accel_state.parallelism.config import ParallelismConfig

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

    choice = choose(**{argument: plugin})

    assert choice.settings is plugin
    assert choice.plugins == {argument: plugin}
    assert choice.engine == ENGINES[argument]
    assert choice.engine_reasons == (argument,)


@pytest.mark.parametrize(("switch", "argument"), [*zip(SWITCHES, ENGINES, strict=True)])
def test_without_an_argument_the_environment_chooses(monkeypatch, switch, argument):
    monkeypatch.setenv(switch, "true")

    choice = choose()

    assert isinstance(choice.settings, PLUGINS[argument])
    assert [*choice.plugins] == [argument]
    assert choice.engine == ENGINES[argument]
    assert choice.engine_reasons == (switch,)


def test_without_either_nothing_is_chosen():
    choice = choose()

    assert (choice.engine, choice.settings, choice.parallelism, choice.plugins) == (None, None, None, {})
    assert (choice.engine_reasons, choice.precision_reason) == ((), "the default")


def engine_of_the_argument() -> str:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    return Accelerator(cpu=True, fsdp_plugin=plugin).engine.name


def test_an_accelerator_has_the_engine_of_its_argument(world):
    names = world.run(engine_of_the_argument, size=1, env={"ACCELERATE_USE_DEEPSPEED": "true"})

    assert names == ["fsdp2"]


def test_a_mesh_of_the_environment_does_not_defeat_an_argument(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    assert choose().engine == "mesh"

    with pytest.warns(UserWarning, match="dp_shard_size=2, over which FSDP .* and deepspeed_plugin"):
        choice = choose(deepspeed_plugin=DeepSpeedPlugin())

    assert ([*choice.plugins], choice.parallelism) == (["deepspeed_plugin"], None)
    with pytest.raises(ValueError, match="parallelism_config has dp_shard_size=2"):
        choose(deepspeed_plugin=DeepSpeedPlugin(), parallelism_config=ParallelismConfig(dp_shard_size=2))


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
        choice = choose(parallelism_config=ParallelismConfig(**mesh))

    assert (choice.engine, choice.engine_reasons) == ("mesh", (*reasons, "parallelism_config"))
    plugin = choice.plugins.get("fsdp_plugin")
    assert plugin is None or plugin.fsdp_version == 2


@pytest.mark.parametrize("variable", ["FSDP_RESHARD_AFTER_FORWARD", "FSDP_SHARDING_STRATEGY"])
@pytest.mark.parametrize(("strategy", "frees"), [("FULL_SHARD", True), ("SHARD_GRAD_OP", False)])
def test_the_strategy_of_version_1_is_that_of_version_2(monkeypatch, variable, strategy, frees):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv(variable, strategy)
    with pytest.warns(UserWarning, match="FSDP version 2 takes the place of version 1"):
        choice = choose(parallelism_config=ParallelismConfig(dp_shard_size=2))
    assert (choice.settings.fsdp_version, choice.settings.reshard_after_forward) == (2, frees)


def test_a_strategy_that_version_2_lacks_is_an_error(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "NO_SHARD")
    with pytest.raises(ValueError, match="with the strategy NO_SHARD: the mesh has dp_shard"):
        choose(parallelism_config=ParallelismConfig(dp_shard_size=2))


def test_no_engine_is_dropped_for_sequence_parallelism(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert choose(parallelism_config=ParallelismConfig(sp_size=2)).engine == "deepspeed"
    with pytest.raises(ValueError, match="dp_shard_size=2, over which FSDP shards"):
        choose(parallelism_config=ParallelismConfig(sp_size=2, dp_shard_size=2))


def test_a_switch_stands_beside_a_mesh_that_its_engine_takes(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert choose(parallelism_config=ParallelismConfig(tp_size=2)).engine == "deepspeed"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    choice = choose(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    assert (choice.settings.fsdp_version, choice.engine_reasons[0]) == (2, "ACCELERATE_USE_FSDP")


def test_sizes_and_precision_have_reasons_too(monkeypatch):
    assert choose(parallelism_config=ParallelismConfig()).engine_reasons == ("parallelism_config",)
    assert choose(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2)).engine_reasons == ("torch_tp_plugin",)
    assert choose(mixed_precision="bf16").precision_reason == "mixed_precision"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert choose().precision_reason == "ACCELERATE_MIXED_PRECISION"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    half = DeepSpeedPlugin({"bf16": {"enabled": True}})
    assert choose(deepspeed_plugin=half).precision_reason == "DeepSpeed's configuration"


@pytest.mark.parametrize("names", [*itertools.combinations(PLUGINS, 2)])
def test_settings_of_two_engines_are_refused(names):
    with pytest.raises(ValueError, match=f"{names[0]} and {names[1]} ask for different engines"):
        choose(**{name: PLUGINS[name]() for name in names})


@pytest.mark.parametrize("argument", PLUGINS)
def test_settings_of_another_class_are_refused(argument):
    with pytest.raises(TypeError, match=f"{argument} takes a {PLUGINS[argument].__name__}"):
        choose(**{argument: object()})


@pytest.mark.parametrize(
    ("argument", "instead"),
    [("deepspeed_plugin", "zero_stage"), ("megatron_lm_plugin", "context_parallel_size")],
)
def test_shards_of_the_mesh_beside_another_engine_are_refused_by_what_was_given(argument, instead):
    config = ParallelismConfig(dp_shard_size=2, cp_size=3)
    said = rf"dp_shard_size=2 and cp_size=3, .* beside {argument}, .*Leave it out \(.*{instead}"
    with pytest.raises(ValueError, match=said) as error:
        choose(parallelism_config=config, **{argument: PLUGINS[argument]()})
    assert "fsdp_plugin" not in str(error.value)


@pytest.mark.parametrize("kind", ["XLA", "MEGATRON_LM"])
def test_engines_that_arrange_processes_themselves_take_no_mesh(kind):
    plugin = MegatronLMPlugin() if kind == "MEGATRON_LM" else None
    config = ParallelismConfig(tp_size=2)
    with pytest.raises(ValueError, match=rf"asks for tp, and the {kind} engine arranges.*Leave it out"):
        choose(megatron_lm_plugin=plugin, parallelism_config=config).engine_on(DistributedType.XLA)


@pytest.mark.parametrize("kind", list(DistributedType))
def test_without_settings_the_processes_choose(kind):
    expected = {"NO": "single", "XLA": "xla"}.get(kind.value, "ddp")
    assert choose().engine_on(kind) == expected


@dataclass
class Settings:
    """Of an engine that no package adds."""

    engine: ClassVar[str] = "elsewhere"


def test_settings_of_another_package_win_over_the_environment(monkeypatch):
    for switch in SWITCHES:
        monkeypatch.setenv(switch, "true")
    settings = Settings()

    choice = choose(outside=settings)

    assert (choice.engine, choice.settings, choice.plugins) == ("elsewhere", settings, {})
    assert choice.engine_reasons == ("Settings",)
    assert choice.engine_on(DistributedType.XLA) == "elsewhere"
    with pytest.raises(ValueError, match="fsdp_plugin and Settings ask for different engines"):
        choose(outside=settings, fsdp_plugin=FullyShardedDataParallelPlugin())
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
