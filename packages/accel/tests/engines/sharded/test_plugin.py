"""FullyShardedDataParallelPlugin: every field, both versions, and the environment."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

from accel.engines.fsdp_groups import choose_groups
from accel.engines.fsdp_plugin import FSDP_SHARDING_STRATEGY, FullyShardedDataParallelPlugin
from accel_state.env import patch_environment


def test_the_defaults_of_version_1():
    plugin = FullyShardedDataParallelPlugin()

    assert plugin.fsdp_version == 1
    assert plugin.sharding_strategy is plugin.reshard_after_forward is fsdp.ShardingStrategy.FULL_SHARD
    assert plugin.backward_prefetch is None
    assert plugin.auto_wrap_policy is None
    assert plugin.cpu_offload == fsdp.CPUOffload(offload_params=False)
    assert plugin.state_dict_type is fsdp.StateDictType.FULL_STATE_DICT
    assert plugin.state_dict_config == fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert plugin.optim_state_dict_config == fsdp.FullOptimStateDictConfig(True, rank0_only=True)
    assert plugin.limit_all_gathers is True
    flags = (plugin.use_orig_params, plugin.sync_module_states, plugin.forward_prefetch)
    flags += (plugin.activation_checkpointing, plugin.cpu_ram_efficient_loading)
    assert flags == (False,) * 5
    assert plugin.mixed_precision_policy is None


def test_the_defaults_of_version_2():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)

    assert plugin.reshard_after_forward is True
    assert plugin.sharding_strategy is None
    assert isinstance(plugin.cpu_offload, fsdp.OffloadPolicy)
    assert not isinstance(plugin.cpu_offload, fsdp.CPUOffloadPolicy)
    assert plugin.state_dict_type is fsdp.StateDictType.SHARDED_STATE_DICT
    assert plugin.sync_module_states is True


def test_the_environment_fills_what_is_not_given():
    with patch_environment(
        FSDP_VERSION="2",
        FSDP_RESHARD_AFTER_FORWARD="false",
        FSDP_OFFLOAD_PARAMS="true",
        FSDP_MIN_NUM_PARAMS="7",
        FSDP_AUTO_WRAP_POLICY="SIZE_BASED_WRAP",
        FSDP_TRANSFORMER_CLS_TO_WRAP="Block,Head",
        FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
        FSDP_ACTIVATION_CHECKPOINTING="true",
        FSDP_CPU_RAM_EFFICIENT_LOADING="true",
        FSDP_IGNORED_MODULES="head",
    ):
        plugin = FullyShardedDataParallelPlugin()
        given = FullyShardedDataParallelPlugin(reshard_after_forward=True, min_num_params=3)

    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, False)
    assert isinstance(plugin.cpu_offload, fsdp.CPUOffloadPolicy)
    assert plugin.auto_wrap_policy is wrap.size_based_auto_wrap_policy
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Head"]
    assert plugin.state_dict_type is fsdp.StateDictType.FULL_STATE_DICT
    assert (plugin.activation_checkpointing, plugin.cpu_ram_efficient_loading) == (True, True)
    assert (plugin.min_num_params, plugin.ignored_modules) == (7, "head")
    assert (given.reshard_after_forward, given.min_num_params) == (True, 3)


def test_classes_are_taken_as_a_list_and_as_names_with_commas():
    """transformers' Trainer joins the names."""
    for given in (["Block", "Head"], "Block,Head", "Block, Head"):
        plugin = FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=given
        )

        assert plugin.transformer_cls_names_to_wrap == ["Block", "Head"]


@pytest.mark.parametrize("name", [*FSDP_SHARDING_STRATEGY, "_HYBRID_SHARD_ZERO2"])
def test_every_strategy_is_known_by_the_name_that_launchers_give_it(name):
    with patch_environment(FSDP_SHARDING_STRATEGY=name.lstrip("_")):
        from_environment = FullyShardedDataParallelPlugin().sharding_strategy
    assert from_environment is FullyShardedDataParallelPlugin(sharding_strategy=name).sharding_strategy
    assert from_environment.name.lstrip("_") == name.lstrip("_")


def test_the_environment_of_version_1():
    with patch_environment(
        FSDP_SHARDING_STRATEGY="HYBRID_SHARD",
        FSDP_BACKWARD_PREFETCH="BACKWARD_POST",
        FSDP_FORWARD_PREFETCH="true",
        FSDP_USE_ORIG_PARAMS="true",
        FSDP_SYNC_MODULE_STATES="true",
    ):
        plugin = FullyShardedDataParallelPlugin()

    assert plugin.sharding_strategy is fsdp.ShardingStrategy.HYBRID_SHARD
    assert plugin.backward_prefetch is fsdp.BackwardPrefetch.BACKWARD_POST
    assert (plugin.forward_prefetch, plugin.use_orig_params, plugin.sync_module_states) == (True,) * 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fsdp_version": 3}, "fsdp_version is 3; allowed: 1, 2"),
        ({"sharding_strategy": "HALF"}, "'HALF'; allowed: FULL_SHARD"),
        ({"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}, "'FULL_SHARD'; allowed: TRUE, FALSE"),
        ({"fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD"}, "HYBRID_SHARD.*ParallelismConfig"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "LOCAL_STATE_DICT.*SHARDED_STATE_DICT"),
        ({"backward_prefetch": "SOON"}, "'SOON'; allowed: BACKWARD_PRE"),
        ({"auto_wrap_policy": "some"}, "'some'; allowed: TRANSFORMER_BASED_WRAP"),
        ({"fsdp_version": 2, "cpu_offload": fsdp.CPUOffload()}, "CPUOffload.*CPUOffloadPolicy"),
        ({"cpu_offload": fsdp.CPUOffloadPolicy()}, "CPUOffloadPolicy.*CPUOffload"),
        ({"mixed_precision_policy": "fp4"}, "'fp4'; allowed: BF16"),
        ({"mixed_precision_policy": {"dtype": "bf16"}}, "unknown dtype; fsdp_version=1 knows buffer_dtype"),
        ({"mixed_precision_policy": fsdp.MixedPrecisionPolicy()}, "takes a MixedPrecision,"),
    ],
)
def test_a_value_that_is_not_known_is_rejected_with_those_that_are(options, told):
    with pytest.raises(ValueError, match=told):
        FullyShardedDataParallelPlugin(**options)


def test_settings_of_the_other_version_are_reported():
    with pytest.warns(UserWarning, match="ignores use_orig_params, forward_prefetch"):
        FullyShardedDataParallelPlugin(fsdp_version=2, use_orig_params=True, forward_prefetch=True)
    with pytest.warns(UserWarning, match="sync_module_states=False is ignored"):
        plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True, sync_module_states=False)
    assert plugin.sync_module_states is True


def test_precision_from_a_name_a_dict_and_the_accelerators():
    short = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
    whole = {"param_dtype": "bf16", "reduce_dtype": torch.bfloat16, "output_dtype": torch.float32}
    full = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=whole)
    later = FullyShardedDataParallelPlugin(fsdp_version=2)
    later.set_mixed_precision("fp16")
    first = FullyShardedDataParallelPlugin(mixed_precision_policy="bf16")

    half = FullyShardedDataParallelPlugin()
    half.set_mixed_precision("bf16")
    assert half.mixed_precision_policy.buffer_dtype is torch.float32
    half.set_mixed_precision("bf16", buffer_autocast=True, override=True)
    assert half.mixed_precision_policy.buffer_dtype is torch.bfloat16
    assert short.mixed_precision_policy == fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert full.mixed_precision_policy == fsdp.MixedPrecisionPolicy(
        torch.bfloat16, torch.bfloat16, torch.float32
    )
    assert later.mixed_precision_policy.param_dtype is torch.float16
    assert first.mixed_precision_policy.reduce_dtype is torch.bfloat16
    full.set_mixed_precision("fp16")
    assert full.mixed_precision_policy.param_dtype is torch.bfloat16
    full.set_mixed_precision("fp16", override=True)
    assert full.mixed_precision_policy.param_dtype is torch.float16


class Layer(torch.nn.Linear):
    pass


class Tower(torch.nn.Sequential):
    _no_split_modules = ("Layer", "Absent")


def test_the_layers_to_wrap_are_found_by_name():
    model = Tower(Layer(2, 2), torch.nn.Linear(2, 2))
    named = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    own = FullyShardedDataParallelPlugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    for plugin in (named, own):
        plugin.set_auto_wrap_policy(model)

    assert isinstance(named.auto_wrap_policy, functools.partial)
    assert named.auto_wrap_policy.keywords == {"transformer_layer_cls": {torch.nn.Linear}}
    assert own.auto_wrap_policy.keywords == {"transformer_layer_cls": {Layer}}


def test_layers_that_the_model_lacks_are_named():
    lost = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Bloc"]
    )
    with pytest.raises(ValueError, match="names Bloc, and Tower has modules of these classes: Layer, Tower"):
        lost.set_auto_wrap_policy(Tower(Layer(2, 2)))
    with pytest.raises(ValueError, match="fsdp_transformer_layer_cls_to_wrap in the config file"):
        lost.set_auto_wrap_policy(Tower(Layer(2, 2)))


def test_a_model_that_names_no_layers_is_sharded_in_one_piece():
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    with pytest.warns(UserWarning, match=r"Sequential is .* in one piece.*fsdp_transformer_layer_cls"):
        groups = choose_groups(torch.nn.Sequential(torch.nn.Linear(2, 2)), plugin)

    assert groups.modules == ()
    plugin.set_auto_wrap_policy(Tower(Layer(2, 2)))  # the next model names its own
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Layer}}


@pytest.mark.parametrize(
    ("version", "options", "reason"),
    [
        (2, {"limit_all_gathers": False}, "always does"),
        (2, {"sync_module_states": False, "cpu_ram_efficient_loading": True}, "only rank 0 has"),
        (2, {"activation_checkpointing_offload": True}, "activation_checkpointing is not set"),
        (1, {"min_num_params": 3, "auto_wrap_policy": "no_wrap"}, "size_based_wrap"),
        (1, {"transformer_cls_names_to_wrap": ["Layer"], "auto_wrap_policy": "no_wrap"}, "transformer_based"),
        (1, {"state_dict_config": fsdp.FullStateDictConfig(rank0_only=False)}, "first process of a machine"),
        (
            1,
            {"optim_state_dict_config": fsdp.FullOptimStateDictConfig(offload_to_cpu=False)},
            "first process",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_reported_once(version, options, reason):
    name = next(iter(options))
    with pytest.warns(UserWarning, match=f"ignores {name}=.*{reason}") as told:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **options)
    assert told[0].filename == __file__
    dataclasses.replace(plugin)  # as engines do; no second warning


def test_a_sharding_strategy_is_given_once():
    with pytest.raises(ValueError, match=r"=FULL_SHARD and sharding_strategy=NO_SHARD .* differ"):
        FullyShardedDataParallelPlugin(
            fsdp_version=1, reshard_after_forward="FULL_SHARD", sharding_strategy="NO_SHARD"
        )
    same = {"reshard_after_forward": "NO_SHARD", "sharding_strategy": "no_shard"}
    assert FullyShardedDataParallelPlugin(fsdp_version=1, **same).sharding_strategy.name == "NO_SHARD"
