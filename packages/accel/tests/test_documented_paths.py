"""What clients import from documented module paths is there, and works."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from accel.utils import constants

NAMES = [
    "accel.accelerator.DataLoaderConfiguration",
    "accel.accelerator.GradientAccumulationPlugin",
    "accel.utils.operations.DistributedOperationException",
    "accel.commands.config.config_args.load_config_from_file",
    "accel.utils.launch.prepare_multi_gpu_env",
    "accel.utils.launch.prepare_simple_launcher_cmd_env",
]


@pytest.mark.parametrize("path", NAMES)
def test_a_name_is_where_clients_look(path):
    module, _, name = path.rpartition(".")

    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("module", "name", "tokens"),
    [
        ("launch", "launch_command_parser", ["--cpu", "train.py"]),
        ("test", "test_command_parser", ["--cpu"]),
        ("estimate", "estimate_command_parser", ["model"]),
        ("tpu", "tpu_command_parser", ["--command", "ls", "--debug"]),
        ("to_fsdp2", "to_fsdp2_command_parser", ["--overwrite"]),
    ],
)
def test_a_command_has_a_parser_that_names_its_function(module, name, tokens):
    make = getattr(importlib.import_module(f"accel.commands.{module}"), name)
    nested = argparse.ArgumentParser()
    command = make(nested.add_subparsers()).prog.split()[-1]

    assert callable(make().parse_args(tokens).func)
    assert nested.parse_args([command, *tokens]).func is make().parse_args(tokens).func


def test_a_config_file_is_read(tmp_path: Path):
    from accel.commands.config.config_args import load_config_from_file

    file = tmp_path / "config.yaml"
    file.write_text("compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\nnum_processes: 2\n")

    assert load_config_from_file(str(file)).mixed_precision == "bf16"


def test_versions_are_of_what_runs_here():
    assert Version(torch.__version__) >= Version(constants.BETA_TP_AVAILABLE_PYTORCH_VERSION)
    assert Version(torch.__version__) >= Version(constants.BETA_CP_AVAILABLE_PYTORCH_VERSION)
    assert Version(constants.BETA_SP_AVAILABLE_DEEPSPEED_VERSION) > Version("0")
    assert Version(constants.BETA_TP_AVAILABLE_TRANSFORMERS_VERSION) > Version("0")


def test_layers_for_upcasting_are_layers():
    assert isinstance(torch.nn.Linear(1, 1), constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)
    assert not isinstance(torch.nn.LayerNorm(1), constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)
