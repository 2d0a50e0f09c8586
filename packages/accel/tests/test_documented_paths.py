"""What clients import from documented module paths is there, and works."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from accel.utils import constants

NAMES = [
    "accel.accelerator.DataLoaderConfiguration",
    "accel.accelerator.GradientAccumulationPlugin",
    "accel.utils.operations.DistributedOperationException",
    "accel.commands.config.config_args.BaseConfig",
    "accel.commands.config.config_args.SageMakerConfig",
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


def test_a_config_is_of_the_class_that_clients_request(tmp_path: Path):
    from accel.commands.config.config_args import BaseConfig, SageMakerConfig, load_config_from_file

    for environment, is_hosted in (("AMAZON_SAGEMAKER", True), ("LOCAL_MACHINE", False)):
        file = tmp_path / "config.yaml"
        file.write_text(f"compute_environment: {environment}\nmixed_precision: bf16\n")
        config = load_config_from_file(str(file))

        assert isinstance(config, BaseConfig)
        assert isinstance(config, SageMakerConfig) == is_hosted


def test_tracker_classes_are_found_and_registered_by_name():
    from accel import tracking
    from accel.trackers import registry
    from accel.utils import LoggerType

    classes = tracking.LOGGER_TYPE_TO_CLASS
    assert classes["wandb"] is classes[LoggerType.WANDB] is tracking.WandBTracker
    assert set(classes) >= {str(kind) for kind in LoggerType} - {"all"}

    class OwnTracker(tracking.GeneralTracker):
        name = "own"
        requires_logging_directory = False
        tracker = None

    classes["own"] = OwnTracker
    try:
        assert registry.filter_trackers("own") == ["own"]
        assert registry.tracker_class("own") is OwnTracker
    finally:
        del classes["own"]


def test_sizes_and_dtypes_of_modeling():
    from accel.utils import modeling

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(3))

    assert modeling.compute_module_total_buffer_size(model) == 2 * 3 * 4 + 8
    assert modeling.compute_module_total_buffer_size(torch.nn.Linear(2, 2)) == 0
    assert modeling._get_proper_dtype("torch.bfloat16") is torch.bfloat16
    assert modeling._get_proper_dtype("float16") is torch.float16
    assert modeling._get_proper_dtype(torch.int8) is torch.int8


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_state_dict_is_filled_in_from_an_offloaded_module(is_offloaded: bool, tmp_path: Path):
    from accel.big_modeling import disk_offload
    from accel.utils.modeling import get_state_dict_from_offload

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if is_offloaded:
        disk_offload(model, tmp_path, execution_device="cpu", offload_buffers=True)
    found = dict.fromkeys(["0.weight", "1.running_mean", "1.weight"], "")
    for name in list(found):
        module = model.get_submodule(name.rpartition(".")[0])
        assert get_state_dict_from_offload(module, name, found) is found

    assert set(found) == {"0.weight", "1.running_mean", "1.weight"}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_helpers_of_test_suites():
    from accel.test_utils.testing import get_backend, run_command

    device, number, memory = get_backend()
    torch.ones(2, device=device)
    assert number >= 1
    assert memory() >= 0
    assert run_command([sys.executable, "-c", "print(1)"]) is None
    command = [sys.executable, "-c", "import os; print(os.environ['OF_THE_TEST'])"]
    assert run_command(command, return_stdout=True, env={"OF_THE_TEST": "text"}).strip() == "text"
    for return_stdout in (False, True):
        with pytest.raises(RuntimeError, match=r"exit code 1:\n(.*\n)*KeyError: 'OF_THE_TEST'"):
            run_command(command, return_stdout=return_stdout)


def test_versions_are_of_what_runs_here():
    assert Version(torch.__version__) >= Version(constants.BETA_TP_AVAILABLE_PYTORCH_VERSION)
    assert Version(torch.__version__) >= Version(constants.BETA_CP_AVAILABLE_PYTORCH_VERSION)
    assert Version(constants.BETA_SP_AVAILABLE_DEEPSPEED_VERSION) > Version("0")
    assert Version(constants.BETA_TP_AVAILABLE_TRANSFORMERS_VERSION) > Version("0")


def test_layers_for_upcasting_are_layers():
    assert isinstance(torch.nn.Linear(1, 1), constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)
    assert not isinstance(torch.nn.LayerNorm(1), constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)
