from __future__ import annotations

from typing import Any

import pytest

from accel_launch.cli import main
from accel_launch.commands.to_fsdp2 import convert
from accel_launch.config import LaunchConfig, load_config_from_file
from accel_launch.errors import ConfigError


def converted(fsdp: dict[str, Any], **rest: Any) -> dict[str, Any]:
    values = {"distributed_type": "FSDP", "num_processes": 8, "num_machines": 1, "fsdp_config": fsdp, **rest}
    config, _ = convert(LaunchConfig.from_values(values))
    return config.to_dict()


FIRST = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": True,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "Block",
    "fsdp_use_orig_params": True,
}


def test_what_version_2_has_stays_and_the_rest_goes():
    assert converted(FIRST)["fsdp_config"] == {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": True,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_version": 2,
    }


@pytest.mark.parametrize(
    ("fsdp", "reshards"),
    [
        ({}, True),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, False),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, False),
        ({"fsdp_sharding_strategy": 2}, False),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, False),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, True),
    ],
)
def test_a_strategy_becomes_whether_parameters_are_freed(fsdp, reshards):
    values = converted({"fsdp_version": 1, **fsdp})
    assert values["fsdp_config"]["fsdp_reshard_after_forward"] is reshards
    assert "parallelism_config" not in values
    assert values["fsdp_config"]["fsdp_state_dict_type"] == "FULL_STATE_DICT"


def test_hybrid_strategies_become_a_mesh_of_machines():
    values = converted({"fsdp_sharding_strategy": "HYBRID_SHARD"}, num_machines=2)
    assert values["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 4,
    }


def test_what_cannot_be_converted_is_rejected():
    assert converted({"fsdp_state_dict_type": "LOCAL_STATE_DICT"})["fsdp_config"]["fsdp_state_dict_type"] == (
        "SHARDED_STATE_DICT"
    )
    with pytest.raises(ConfigError, match="distributed data parallel"):
        converted({"fsdp_sharding_strategy": "NO_SHARD"})
    with pytest.raises(ConfigError, match="version 2 already"):
        converted({"fsdp_version": 2})
    with pytest.raises(ConfigError, match="nothing to convert"):
        converted(FIRST, distributed_type="MULTI_GPU")


def test_the_command_writes_a_file_and_leaves_others_alone(tmp_path, capsys):
    source, target = tmp_path / "one.yaml", tmp_path / "two.yaml"
    LaunchConfig.from_values({"distributed_type": "FSDP", "fsdp_config": dict(FIRST)}).write(source)

    assert main(["to-fsdp2", "--config_file", str(source)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["to-fsdp2", "--config_file", str(source), "--output_file", str(target)]) == 0
    assert "fsdp_use_orig_params is gone" in capsys.readouterr().out
    assert load_config_from_file(target).settings["fsdp_version"] == 2
    assert main(["to-fsdp2", "--config_file", str(source), "--output_file", str(target)]) == 2
    assert main(["to-fsdp2", "--config_file", str(source), "--overwrite"]) == 0
    assert load_config_from_file(source).settings == load_config_from_file(target).settings
    assert main(["to-fsdp2", "--config_file", str(source), "--overwrite"]) == 2
    assert "already" in capsys.readouterr().err
