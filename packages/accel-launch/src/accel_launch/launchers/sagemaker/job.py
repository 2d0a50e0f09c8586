"""Make a training job on Amazon SageMaker, and wait for it."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from typing import Any

from accel_launch.config import LaunchConfig
from accel_launch.errors import LaunchError
from accel_launch.launchers.sagemaker.estimator import prepare_sagemager_args_inputs
from accel_launch.settings.redact import redact_values
from accel_state.env import patch_environment
from accel_state.imports.packages import install_hint


def job_text(config: LaunchConfig, args: argparse.Namespace) -> str:
    """Return what would be started, as text.

    Args:
        config: A config for Amazon SageMaker.
        args: What `launch_command_parser().parse_args()` returned.
    """
    estimator, inputs = prepare_sagemager_args_inputs(config, args)
    shown = json.dumps(
        redact_values({"estimator": vars(estimator), "inputs": inputs}), indent=2, sort_keys=True, default=str
    )
    return f"# a training job on Amazon SageMaker\n{shown}"


def run_job(config: LaunchConfig, args: argparse.Namespace) -> None:
    """Make the training job and wait until it ends.

    Args:
        config: A config for Amazon SageMaker.
        args: What `launch_command_parser().parse_args()` returned.

    Raises:
        LaunchError: If the SDK is not installed, or the job cannot be made or fails.
    """
    estimator_args, inputs = prepare_sagemager_args_inputs(config, args)
    # The SDK's boto3 reads the account from variables.
    with patch_environment(**_account(config, args)):
        estimator = _huggingface()(**vars(estimator_args))
        # Waits until the job ends, and shows its log.
        estimator.fit(inputs=inputs or None)
    print(f"Training job: {estimator.latest_training_job.name}")
    print(f"Model: {estimator.model_data}")


def _huggingface() -> Any:
    try:
        return import_module("sagemaker.huggingface").HuggingFace
    except ImportError as error:
        raise LaunchError(
            f"Amazon SageMaker needs its SDK, version 2: {error}. Install it with: "
            f"{install_hint('sagemaker', 'accel-launch')}."
        ) from None


def _account(config: LaunchConfig, args: argparse.Namespace) -> dict[str, str]:
    """Return the variables that name the account: a profile, or a pair of keys, and the region."""
    profile, region = config.values.get("profile"), config.values.get("region")
    keys = {name: getattr(args, name, None) for name in ("aws_access_key_id", "aws_secret_access_key")}
    provided = {name: text for name, text in keys.items() if text}
    if len(provided) == 1:
        raise LaunchError("--aws_access_key_id and --aws_secret_access_key must be used together; pass both.")
    credentials = provided or ({"aws_profile": profile} if profile else {})
    return {**credentials, **({"aws_default_region": region} if region else {})}
