"""From a config file and the flags to what SageMaker's estimator takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from accel_launch.config import LaunchConfig
from accel_launch.errors import ConfigError, LaunchError
from accel_launch.launchers.sagemaker.values import hyperparameters, read_inputs, read_metrics
from accel_launch.plan.environment import common_environment
from accel_launch.settings.resolve import Settings, resolve
from accel_state import env

_DISTRIBUTIONS: dict[str, dict[str, Any] | None] = {
    "NO": None,
    "DATA_PARALLEL": {"smdistributed": {"dataparallel": {"enabled": True}}},
    "MODEL_PARALLEL": {"smdistributed": {"modelparallel": {"enabled": True}}},
}


def prepare_sagemager_args_inputs(
    sagemaker_config: LaunchConfig, args: argparse.Namespace
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return what a training job is made of.

    Args:
        sagemaker_config: A config for Amazon SageMaker.
        args: What `launch_command_parser().parse_args()` returned.

    Returns:
        The arguments of `sagemaker.huggingface.HuggingFace`, and the inputs of its `fit`: the location of
        each channel's data.

    Raises:
        ConfigError: If the config lacks something, or a file that it names is missing.
        LaunchError: If the script cannot be a job's, or its arguments cannot be hyper-parameters.
    """
    # Without this machine's variables: the job runs elsewhere.
    settings = resolve(args, sagemaker_config, {})
    script = _script(settings, args)
    value = sagemaker_config.values.get
    inputs, metrics = value("sagemaker_inputs_file"), value("sagemaker_metrics_file")
    estimator = {
        "entry_point": script.name,
        "source_dir": str(script.parent),
        "role": _needed(sagemaker_config, "iam_role_name"),
        "instance_type": _needed(sagemaker_config, "ec2_instance_type"),
        "instance_count": int(settings.value("num_machines")),
        "base_job_name": value("base_job_name"),
        "hyperparameters": hyperparameters(args.training_script_args or []),
        "environment": _environment(settings, sagemaker_config),
        "distribution": _DISTRIBUTIONS[sagemaker_config.distributed_type],
        "debugger_hook_config": False,  # it slows training down, and accel needs nothing of it
        "metric_definitions": read_metrics(metrics) if metrics else None,
        **_image(sagemaker_config),
        # Last, so that the config file may replace any of these.
        **(value("additional_args") or {}),
    }
    return argparse.Namespace(**estimator), read_inputs(inputs) if inputs else {}


def _script(settings: Settings, args: argparse.Namespace) -> Path:
    wrong = [name for name in ("module", "no_python") if settings.value(name)]
    script = getattr(args, "training_script", None)
    if wrong:
        raise LaunchError(f"--{wrong[0]} is not for SageMaker, which runs a Python file. Name the file.")
    if settings.value("drop_in"):
        raise LaunchError(
            "--drop_in is not for SageMaker, where accel lies elsewhere. Begin the script with "
            "`import accel.drop_in; accel.drop_in.activate()`."
        )
    if script is None:
        raise LaunchError("No script was passed: accel launch [flags] SCRIPT [arguments of the script].")
    # Absolute, as its folder is what the estimator uploads.
    path = Path(script).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise LaunchError(
            f"SageMaker runs a Python file, and {script!r} is not an existing one. Name the file."
        )
    return path


def _needed(config: LaunchConfig, key: str) -> Any:
    if not config.values.get(key):
        raise ConfigError(f"Config file {config.path} is for Amazon SageMaker and has no {key}. Add the key.")
    return config.values[key]


def _image(config: LaunchConfig) -> dict[str, Any]:
    """Return the container: an image, or the versions that choose one."""
    py_version = _needed(config, "py_version")
    if config.values.get("image_uri"):
        return {"image_uri": config.values["image_uri"], "py_version": py_version}
    versions = ("transformers_version", "pytorch_version")
    return {"py_version": py_version, **{key: _needed(config, key) for key in versions}}


def _environment(settings: Settings, config: LaunchConfig) -> dict[str, str]:
    environ = common_environment(settings, {}, gpus=None, threads=None)
    env.put(environ, "ACCELERATE_USE_SAGEMAKER", True)
    env.put(environ, "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", config.distributed_type)
    return environ
