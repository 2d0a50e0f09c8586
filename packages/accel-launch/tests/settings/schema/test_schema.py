from __future__ import annotations

from pathlib import Path

import pytest

from accel_launch.settings.schema import GROUPS, SETTINGS, config_setting, nearest, section_names
from accel_state.env import VARIABLES

# Written out a second time on purpose: a flag that the schema loses must be missed here.
DOCUMENTED = Path(__file__).with_name("documented_flags.txt").read_text().split()
CONFIG_KEYS = Path(__file__).with_name("documented_keys.txt").read_text().split()


def test_every_documented_flag_is_there() -> None:
    assert [flag for flag in DOCUMENTED if flag not in SETTINGS] == []


def test_every_documented_config_key_is_there() -> None:
    assert [key for key in CONFIG_KEYS if config_setting(key) is None] == []


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_well_formed(name: str) -> None:
    setting = SETTINGS[name]

    assert setting.group in GROUPS
    assert setting.help
    assert not setting.from_environment or VARIABLES[setting.spec.name] is setting.spec
    if setting.default not in (None, ()):
        assert setting.parse(setting.default) == setting.default


def test_groups_are_enabled_by_settings() -> None:
    assert all(group.enabled_by in SETTINGS for group in GROUPS.values() if group.enabled_by)


@pytest.mark.parametrize(
    ("section", "key", "name"),
    [
        ("fsdp_config", "fsdp_version", "fsdp_version"),
        ("fsdp_config", "min_num_params", "fsdp_min_num_params"),
        ("fp8_config", "backend", "fp8_backend"),
        ("fp8_config", "fp8_format", "fp8_format"),
        ("dynamo_config", "dynamo_backend", "dynamo_backend"),
        ("parallelism_config", "tp_size", "parallelism_config_tp_size"),
        ("parallelism_config", "parallelism_config_cp_size", "parallelism_config_cp_size"),
        ("megatron_lm_config", "megatron_lm_pp_degree", "megatron_lm_pp_degree"),
        ("mpirun_config", "mpirun_ccl", "mpirun_ccl"),
        ("deepspeed_config", "zero_stage", "zero_stage"),
        ("deepspeed_config", "deepspeed_hostfile", "deepspeed_hostfile"),
        ("deepspeed_config", "gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("", "use_cpu", "cpu"),
    ],
)
def test_config_keys_lead_to_settings(section: str, key: str, name: str) -> None:
    found = config_setting(key, section)

    assert found is not None
    assert found.name == name


def test_unknown_config_keys_lead_nowhere() -> None:
    assert config_setting("version") is None
    assert config_setting("tp_size", "fsdp_config") is None
    assert "fsdp_config" in section_names()


def test_nearest_names_one_word_or_nothing() -> None:
    assert nearest("num_proceses", ["num_processes", "num_machines"]) == " Did you mean num_processes?"
    assert nearest("xyz", ["num_processes"]) == ""
