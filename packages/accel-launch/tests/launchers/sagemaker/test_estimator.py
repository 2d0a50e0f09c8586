from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.config import LaunchConfig
from accel_launch.errors import ConfigError, LaunchError
from accel_launch.launchers.sagemaker.estimator import prepare_sagemager_args_inputs

Start = Callable[..., Any]
CONFIG = {
    "compute_environment": "AMAZON_SAGEMAKER",
    "distributed_type": "DATA_PARALLEL",
    "ec2_instance_type": "ml.p3.16xlarge",
    "iam_role_name": "trainer",
    "mixed_precision": "fp16",
    "num_machines": 2,
    "py_version": "py310",
    "pytorch_version": "2.1.0",
    "transformers_version": "4.36.0",
    "base_job_name": "accel",
}


def prepared(tmp_path: Path, *arguments: str, **changes: Any) -> tuple[dict[str, Any], dict[str, str]]:
    (tmp_path / "train.py").touch()
    config = LaunchConfig.from_values({**CONFIG, **changes}, Path("c.yaml"))
    args = launch_command_parser().parse_args([*arguments, str(tmp_path / "train.py"), "--lr", "0.1"])
    estimator, inputs = prepare_sagemager_args_inputs(config, args)
    return vars(estimator), inputs


def test_the_config_and_the_flags_make_the_estimator(tmp_path: Path) -> None:
    (tmp_path / "inputs.tsv").write_text("train\ts3://bucket/train\n")
    (tmp_path / "metrics.tsv").write_text("loss\tloss=(.*)\n")
    files = {f"sagemaker_{kind}_file": str(tmp_path / f"{kind}.tsv") for kind in ("inputs", "metrics")}
    more = {"additional_args": {"volume_size": 50}}

    found, inputs = prepared(tmp_path, "--mixed_precision", "bf16", **files, **more)

    assert inputs == {"train": "s3://bucket/train"}
    assert found == {
        "entry_point": "train.py",
        "source_dir": str(tmp_path),
        "role": "trainer",
        "instance_type": "ml.p3.16xlarge",
        "instance_count": 2,
        "base_job_name": "accel",
        "hyperparameters": {"lr": 0.1},
        "environment": {
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "ACCELERATE_DYNAMO_BACKEND": "no",
            "ACCELERATE_USE_SAGEMAKER": "true",
            "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL",
        },
        "distribution": {"smdistributed": {"dataparallel": {"enabled": True}}},
        "debugger_hook_config": False,
        "metric_definitions": [{"Name": "loss", "Regex": "loss=(.*)"}],
        "py_version": "py310",
        "pytorch_version": "2.1.0",
        "transformers_version": "4.36.0",
        "volume_size": 50,
    }


def test_an_image_stands_for_the_versions(tmp_path: Path) -> None:
    found, _ = prepared(
        tmp_path, image_uri="account/image:1", pytorch_version=None, transformers_version=None
    )

    assert found["image_uri"] == "account/image:1"
    assert "pytorch_version" not in found


@pytest.mark.parametrize("key", ["iam_role_name", "ec2_instance_type", "py_version", "pytorch_version"])
def test_what_the_config_lacks_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"c.yaml is for Amazon SageMaker and has no {key}"):
        prepared(tmp_path, **{key: None})


@pytest.mark.parametrize("flag", ["--module", "--drop_in"])
def test_modules_and_the_switch_to_accel_are_rejected(tmp_path: Path, flag: str) -> None:
    with pytest.raises(LaunchError, match=f"{flag} is not for SageMaker"):
        prepared(tmp_path, flag)


def test_a_dry_run_shows_the_job_and_needs_no_sdk(start: Start, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("".join(f"{key}: {value}\n" for key, value in CONFIG.items()))
    run = start("launch", "--config_file", "c.yaml", "--dry_run", script="pass\n")
    code, out, error = run.finish()

    assert (code, error) == (0, "")
    assert '"instance_type": "ml.p3.16xlarge"' in out


def test_keys_without_such_a_config_give_a_warning(start: Start) -> None:
    _, _, error = start("launch", "--aws_access_key_id", "x", script="pass\n").finish()

    assert error == (
        "accel launch: warning: Ignored without a config for Amazon SageMaker: --aws_access_key_id.\n"
    )
