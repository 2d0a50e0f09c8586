from __future__ import annotations

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.config.file import LaunchConfig
from accel_launch.plan.environment import common_environment, worker_environment
from accel_launch.settings.resolve import Settings, resolve
from accel_launch.settings.schema import SETTINGS
from accel_state import env
from accel_state.env import CPUInformation

ENABLING = {
    "dynamo": ["--dynamo_backend", "inductor"],
    "fsdp": ["--use_fsdp"],
    "parallelism": ["--use_parallelism_config"],
    "fp8": ["--mixed_precision", "fp8"],
    "deepspeed": ["--use_deepspeed"],
    "megatron": ["--use_megatron_lm"],
}
# The drop-in needs the package accel, and is tested there.
WRITTEN = [
    setting
    for setting in SETTINGS.values()
    if setting.from_environment and setting.group != "resources" and setting.name != "drop_in"
]


def settle(*flags: str, environ: dict[str, str] | None = None) -> Settings:
    return resolve(launch_command_parser().parse_args([*flags, "s.py"]), None, environ or {})


def common(settings: Settings, base: dict[str, str] | None = None) -> dict[str, str]:
    return common_environment(settings, base or {}, gpus=None, threads=None)


def sample(name: str) -> str:
    setting = SETTINGS[name]
    if setting.spec.choices:
        return str(setting.spec.choices[-1])
    return {"flag": "true", "flags": "true,false,true", "list": "A,B", "str": "text"}.get(
        setting.spec.kind, "7"
    )


@pytest.mark.parametrize("name", [setting.name for setting in WRITTEN])
def test_a_flag_reaches_the_library_through_its_variable(name: str) -> None:
    setting = SETTINGS[name]
    flags = [*ENABLING.get(setting.group, []), f"--{name}={sample(name)}"]
    settings = settle(*flags)

    environ = common(settings)

    assert env.get(setting.spec.name, environ) == settings.value(name)


def test_groups_that_are_off_write_nothing() -> None:
    with pytest.warns(UserWarning, match="Ignored"):
        settings = settle("--fsdp_version", "2", "--parallelism_config_tp_size", "2")

    assert common(settings) == {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"}


FSDP_DEFAULTS = {
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_BACKWARD_PREFETCH": "NO_PREFETCH",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


@pytest.mark.parametrize(
    "config",
    [
        None,
        LaunchConfig.from_values({"distributed_type": "FSDP"}),
        LaunchConfig.from_values({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}),
    ],
)
def test_documented_defaults_reach_the_workers(config: LaunchConfig | None) -> None:
    args = launch_command_parser().parse_args([*(["--use_fsdp"] * (config is None)), "s.py"])
    environ = common(resolve(args, config, {}))

    assert environ["ACCELERATE_DYNAMO_BACKEND"] == "no"
    assert environ.items() >= FSDP_DEFAULTS.items()
    assert "FSDP_STATE_DICT_TYPE" not in environ  # without a default
    assert "ACCELERATE_DYNAMO_MODE" not in environ  # nothing is compiled
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in environ  # the script's argument counts


def test_defaults_do_not_come_before_the_shell() -> None:
    base = {"FSDP_VERSION": "2", "ACCELERATE_DYNAMO_BACKEND": "eager"}
    environ = common(settle("--use_fsdp", environ=base), base)

    assert environ.items() >= base.items()
    assert environ["ACCELERATE_DYNAMO_MODE"] == "default"


def test_the_shells_own_variables_pass_through_untouched() -> None:
    base = {"ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_VERSION": "2", "OTHER": "x y"}
    base["ACCELERATE_DYNAMO_BACKEND"] = "no"

    assert common(settle(environ=base), base) == base


def test_a_flag_replaces_the_shells_variable() -> None:
    base = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_DEBUG_MODE": "true"}
    environ = common(settle("--cpu=false", "--debug=false", environ=base), base)

    assert env.get("ACCELERATE_USE_CPU", environ) is False
    assert env.get("ACCELERATE_DEBUG_MODE", environ) is False


def test_which_settings_of_deepspeed_the_config_file_has_is_written() -> None:
    section = {"zero_stage": 2, "gradient_clipping": 1.0, "offload_param_device": "none"}
    config = LaunchConfig.from_values({"distributed_type": "DEEPSPEED", "deepspeed_config": section})
    args = launch_command_parser().parse_args(["--zero_stage", "3", "s.py"])

    environ = common(resolve(args, config, {}))

    fields = env.get("ACCELERATE_CONFIG_DS_FIELDS", environ)
    assert sorted(fields) == ["gradient_clipping", "offload_param_device"]  # a flag came before the file
    assert "ACCELERATE_CONFIG_DS_FIELDS" not in common(settle("--use_deepspeed", "--zero_stage", "3"))


def test_gpus_and_threads_are_written_as_planned() -> None:
    environ = common_environment(settle(), {}, gpus="1,2", threads=3)

    assert (environ["CUDA_VISIBLE_DEVICES"], environ["OMP_NUM_THREADS"]) == ("1,2", "3")


def test_a_worker_knows_its_place_and_nothing_of_an_outer_torchrun() -> None:
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x", "RANK": "5", "KEPT": "1"}

    assert worker_environment(outer, CPUInformation(1, 2, 1, 2), "127.0.0.1", 29500) == {
        "KEPT": "1",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "ACCELERATE_NUM_PROCESSES": "2",
    }
