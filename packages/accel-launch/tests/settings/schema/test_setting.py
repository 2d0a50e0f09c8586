from __future__ import annotations

from typing import Any

import pytest

from accel_launch.settings.schema import SETTINGS


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("cpu", "yes", True),
        ("cpu", False, False),
        ("num_processes", "4", 4),
        ("num_machines", "1:3", "1:3"),
        ("num_machines", "2:2", 2),
        ("mixed_precision", "BF16", "bf16"),
        ("mixed_precision", False, "no"),  # an unquoted `no` in YAML
        ("dynamo_backend", False, "no"),
        ("dynamo_backend", "INDUCTOR", "inductor"),
        ("fsdp_sharding_strategy", 1, "FULL_SHARD"),
        ("fsdp_min_num_params", "1e8", 100_000_000),
        ("fsdp_reshard_after_forward", True, "true"),
        ("fsdp_transformer_layer_cls_to_wrap", ["A", "B"], ["A", "B"]),
        ("fp8_override_linear_precision", "(false, true, false)", (False, True, False)),
        ("vm", "one", ["one"]),
    ],
)
def test_values_are_read(name: str, given: Any, value: Any) -> None:
    assert SETTINGS[name].parse(given) == value


@pytest.mark.parametrize(
    ("name", "given", "allowed"),
    [
        ("mixed_precision", "fp17", "no, fp8, fp16, bf16"),
        ("num_processes", "0", "an integer, at least 1"),
        ("num_processes", "two", "an integer, at least 1"),
        ("num_machines", "3:1", "N or MIN:MAX"),
        ("num_machines", "1:2:3", "N or MIN:MAX"),
        ("main_process_port", "65536", "an integer from 0 (any free port) to 65535"),
        ("monitor_interval", "nan", "seconds, at least 0"),
        ("cpu", "maybe", "true or false"),
        ("tee", "4", "0, 1, 2, 3"),
        ("main_process_ip", {"a": 1}, "text"),
        ("num_processes", [1, 2], "an integer"),
    ],
)
def test_an_error_names_the_value_and_what_is_allowed(name: str, given: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        SETTINGS[name].parse(given)

    assert repr(given) in str(error.value)
    assert allowed in str(error.value)
