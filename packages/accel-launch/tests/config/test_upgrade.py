from __future__ import annotations

from typing import Any

import pytest

from accel_launch.config import LaunchConfig
from accel_launch.errors import ConfigError


def load(values: dict[str, Any]) -> LaunchConfig:
    return LaunchConfig.from_values(values)


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ({"fp16": True}, {"mixed_precision": "fp16"}, "use mixed_precision: fp16"),
        ({"fp16": False}, {"mixed_precision": "no"}, "fp16: False is an old form; use mixed_precision: 'no'"),
        ({"fp16": False, "mixed_precision": "no"}, {"mixed_precision": "no"}, "use mixed_precision: 'no'"),
        (
            {"fp16": True, "mixed_precision": "bf16"},
            {"mixed_precision": "bf16"},
            "ignored, as the file has mixed_precision: bf16",
        ),
        ({"dynamo_backend": "INDUCTOR"}, {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_config"),
        ({"distributed_type": "TPU"}, {"distributed_type": "XLA"}, "use XLA"),
        (
            {"fsdp_config": {"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}},
            {"fsdp_config": {"fsdp_backward_prefetch": "BACKWARD_PRE"}},
            "use fsdp_backward_prefetch",
        ),
        (
            {"fp8_config": {"amax_history_length": 8, "amax_compute_algorithm": "max"}},
            {"fp8_config": {"fp8_amax_history_len": 8, "fp8_amax_compute_algo": "max"}},
            "use fp8_amax",
        ),
        ({"distributed_type": "MPS", "use_mps_device": True}, {"distributed_type": "NO"}, "use NO|no effect"),
        (
            {"distributed_type": "TP", "tp_config": {"tp_size": 4}},
            {"distributed_type": "MULTI_GPU", "parallelism_config": {"parallelism_config_tp_size": 4}},
            "parallelism_config_tp_size|MULTI_GPU",
        ),
        ({"gpu_ids": [0, 1]}, {"gpu_ids": "0,1"}, "use text such as 0,1"),
        ({"use_xpu": True}, {}, "no effect"),
        ({"ipex_config": {"ipex": True}}, {}, "IPEX is part of torch"),
    ],
)
def test_old_forms_load_with_a_warning(old: dict[str, Any], new: dict[str, Any], hint: str) -> None:
    with pytest.warns(FutureWarning, match=hint):
        assert load(old).to_dict() == new


def test_an_obsolete_key_that_is_off_needs_no_warning() -> None:
    assert load({"use_xpu": False, "ipex_config": {}}).to_dict() == {}


def test_the_first_fsdp_section_had_no_prefixes_and_numbers() -> None:
    section = {"sharding_strategy": 1, "offload_params": False, "min_num_params": 2000}
    with pytest.warns(FutureWarning) as notes:
        config = load({"fsdp_config": section})

    assert "fsdp_config.sharding_strategy is an old form; use fsdp_sharding_strategy" in str(notes[0].message)
    assert len(notes) == 3
    assert set(config.to_dict()["fsdp_config"]) == set(config.settings)
    assert config.settings == {
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_offload_params": False,
        "fsdp_min_num_params": 2000,
    }


@pytest.mark.filterwarnings("ignore:Config file:FutureWarning")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fp16": "maybe"}, "key fp16: 'maybe' is neither true nor false"),
        (
            {"dynamo_backend": "INDUCTOR", "dynamo_config": "INDUCTOR"},
            "'INDUCTOR' is not a section of keys",
        ),
        ({"tp_config": 4}, "key tp_config: 4 is not a section of keys"),
    ],
)
def test_an_old_form_that_cannot_be_rewritten_names_its_key(values, message):
    with pytest.raises(ConfigError, match=message):
        load(values)
