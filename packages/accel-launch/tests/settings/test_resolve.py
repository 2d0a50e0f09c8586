from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.config import LaunchConfig
from accel_launch.errors import LaunchError
from accel_launch.settings.resolve import Settings, Source, resolve


def settle(
    *flags: str, config: dict[str, Any] | None = None, environ: dict[str, str] | None = None
) -> Settings:
    args = launch_command_parser().parse_args([*flags, "script.py"])
    file = None if config is None else LaunchConfig.from_values(config, Path("c.yaml"))
    return resolve(args, file, environ or {})


def test_flag_beats_environment_beats_file_beats_default() -> None:
    config = {"mixed_precision": "fp16"}
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    found = [
        settle()["mixed_precision"],
        settle(config=config)["mixed_precision"],
        settle(config=config, environ=environ)["mixed_precision"],
        settle("--mixed_precision", "fp8", config=config, environ=environ)["mixed_precision"],
    ]

    assert [(effective.value, effective.detail) for effective in found] == [
        ("no", "default"),
        ("fp16", "c.yaml"),
        ("bf16", "ACCELERATE_MIXED_PRECISION"),
        ("fp8", "--mixed_precision"),
    ]


def test_a_switch_that_is_set_to_false_wins_too() -> None:
    assert settle("--cpu=false", config={"use_cpu": True}).value("cpu") is False


def test_a_bare_namespace_is_enough() -> None:
    assert resolve(argparse.Namespace(), None, {}).value("num_machines") == 1


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(LaunchError, match=r"ACCELERATE_MIXED_PRECISION: 'fp17'.*no, fp8, fp16, bf16"):
        settle(environ={"ACCELERATE_MIXED_PRECISION": "fp17"})


def test_an_empty_variable_counts_as_unset_but_for_hidden_gpus() -> None:
    settings = settle(
        config={"gpu_ids": "0,1", "num_processes": 2},
        environ={"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_NUM_PROCESSES": ""},
    )

    assert (settings.value("gpu_ids"), settings.value("num_processes")) == ("", 2)


def test_variables_of_the_run_that_we_are_part_of_do_not_count() -> None:
    environ = {"LOCAL_RANK": "1", "MASTER_PORT": "1234", "ACCELERATE_NUM_PROCESSES": "4"}

    inside = settle(environ=environ)
    assert not inside.is_set("main_process_port")
    assert not inside.is_set("num_processes")

    del environ["LOCAL_RANK"]
    assert settle(environ=environ).value("main_process_port") == 1234


@pytest.mark.parametrize(
    ("kind", "name"),
    [("MULTI_GPU", "multi_gpu"), ("FSDP", "use_fsdp"), ("MULTI_CPU", "cpu")],
)
def test_the_files_distributed_type_switches_things_on(kind: str, name: str) -> None:
    effective = settle(config={"distributed_type": kind})[name]

    assert effective.value is True
    assert effective.source == Source.CONFIG


def test_a_flag_chooses_another_kind_than_the_file() -> None:
    settings = settle("--multi_gpu", config={"distributed_type": "FSDP"})

    assert (settings.value("multi_gpu"), settings.value("use_fsdp")) == (True, False)


def test_a_section_of_the_file_switches_the_mesh_on() -> None:
    settings = settle(config={"parallelism_config": {"parallelism_config_tp_size": 2}})

    assert settings.value("use_parallelism_config") is True
    assert settle(config={"parallelism_config": {}}).value("use_parallelism_config") is False


@pytest.mark.parametrize(
    "flags",
    [
        ("--module", "--no_python"),
        ("--multi_gpu", "--cpu"),
    ],
)
def test_flags_that_exclude_each_other(flags: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError, match=f"{flags[0]} .* and {flags[1]} .* exclude each other"):
        settle(*flags)


def test_one_file_cannot_request_both() -> None:
    with pytest.raises(LaunchError, match="exclude each other"):
        settle(config={"distributed_type": "MULTI_GPU", "use_cpu": True})


def test_the_nearer_source_wins_where_two_exclude_each_other() -> None:
    by_flag = settle("--cpu", config={"distributed_type": "MULTI_GPU"})
    assert (by_flag.value("cpu"), by_flag.value("multi_gpu")) == (True, False)

    over_environment = settle("--multi_gpu", environ={"ACCELERATE_USE_CPU": "true"})
    assert (over_environment.value("cpu"), over_environment["cpu"].detail) == (False, "--multi_gpu")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"distributed_type": "DEEPSPEED"}, "use_deepspeed"),
        ({"distributed_type": "MEGATRON_LM"}, "use_megatron_lm"),
        ({"distributed_type": "XLA", "tpu_use_cluster": True}, "tpu"),
    ],
)
def test_a_files_kind_switches_its_engine_on(config: dict[str, Any], name: str) -> None:
    assert settle(config=config).value(name) is True


def test_leftover_sections_of_other_engines_are_no_request() -> None:
    with pytest.warns(UserWarning, match=r"Ignored without --use_deepspeed: zero_stage \(c.yaml\)"):
        settings = settle(
            config={"deepspeed_config": {"zero_stage": 3}, "mpirun_config": {"mpirun_ccl": "1"}}
        )

    assert settings.value("use_deepspeed") is False


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--fsdp_version", "2"), "without --use_fsdp: fsdp_version"),
        (("--parallelism_config_tp_size", "2"), "without --use_parallelism_config"),
        (("--dynamo_mode", "max-autotune"), "without --dynamo_backend"),
        (("--fp8_margin", "2"), "without --mixed_precision fp8"),
    ],
)
def test_settings_that_do_not_count_give_a_warning(flags: tuple[str, ...], match: str) -> None:
    with pytest.warns(UserWarning, match=match):
        settle(*flags)


def test_settings_that_count_give_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settle(
            "--use_fsdp", "--fsdp_version", "2", "--dynamo_backend", "inductor", "--dynamo_mode", "default"
        )
        settle(config={"dynamo_config": {"dynamo_backend": "NO", "dynamo_mode": "default"}})
