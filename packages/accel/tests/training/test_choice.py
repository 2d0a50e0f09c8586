"""Arguments choose before the environment, and the environment before defaults; the reasons are told."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from accel.accelerator import Accelerator
from accel.engines.deepspeed.plugin import DeepSpeedPlugin
from accel.engines.megatron.plugin import MegatronLMPlugin
from accel.engines.mesh.tensor.plugin import TorchTensorParallelPlugin
from accel.engines.sharded.plugin import FullyShardedDataParallelPlugin
from accel.training.choice import choose
from accel_state.parallelism.config import ParallelismConfig

PLUGINS = {
    "deepspeed_plugin": DeepSpeedPlugin,
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "megatron_lm_plugin": MegatronLMPlugin,
}
FIELDS = {"deepspeed_plugin": "deepspeed", "fsdp_plugin": "fsdp", "megatron_lm_plugin": "megatron"}
SWITCHES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")


@pytest.mark.parametrize("argument", PLUGINS)
@pytest.mark.parametrize("on", [on for n in range(4) for on in itertools.combinations(SWITCHES, n)])
def test_a_plugin_wins_over_every_switch_of_the_environment(monkeypatch, argument, on):
    plugin: Any = PLUGINS[argument]()
    for switch in on:
        monkeypatch.setenv(switch, "true")

    choice = choose(**{argument: plugin})

    assert getattr(choice, FIELDS[argument]) is plugin
    assert [name for name in FIELDS.values() if getattr(choice, name) is not None] == [FIELDS[argument]]
    assert choice.engine_reasons == (argument,)


@pytest.mark.parametrize(("switch", "field"), [*zip(SWITCHES, FIELDS.values(), strict=True)])
def test_without_an_argument_the_environment_chooses(monkeypatch, switch, field):
    monkeypatch.setenv(switch, "true")

    choice = choose()

    assert [name for name in FIELDS.values() if getattr(choice, name) is not None] == [field]
    assert choice.engine_reasons == (switch,)


def test_without_either_nothing_is_chosen():
    choice = choose()

    assert (choice.deepspeed, choice.fsdp, choice.megatron, choice.parallelism) == (None,) * 4
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
    assert choose().fsdp is not None

    with pytest.warns(UserWarning, match="dp_shard_size=2, over which FSDP .* and deepspeed_plugin"):
        choice = choose(deepspeed_plugin=DeepSpeedPlugin())

    assert (choice.fsdp, choice.parallelism) == (None, None)
    with pytest.raises(ValueError, match="parallelism_config has dp_shard_size=2"):
        choose(deepspeed_plugin=DeepSpeedPlugin(), parallelism_config=ParallelismConfig(dp_shard_size=2))


def test_sizes_and_precision_have_reasons_too(monkeypatch):
    assert choose(parallelism_config=ParallelismConfig()).engine_reasons == ("parallelism_config",)
    assert choose(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2)).engine_reasons == ("torch_tp_plugin",)
    assert choose(mixed_precision="bf16").precision_reason == "mixed_precision"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert choose().precision_reason == "ACCELERATE_MIXED_PRECISION"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    half = DeepSpeedPlugin({"bf16": {"enabled": True}})
    assert choose(deepspeed_plugin=half).precision_reason == "DeepSpeed's configuration"
