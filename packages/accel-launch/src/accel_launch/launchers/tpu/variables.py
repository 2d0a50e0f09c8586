"""The variables that set how torch_xla computes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from accel_launch.settings.resolve import Settings
from accel_state import env


def prepare_tpu(
    args: argparse.Namespace, current_env: Mapping[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add what a run on TPUs needs to an environment.

    Args:
        args: Launch settings, such as `launch_command_parser().parse_args()` returns: mixed_precision,
            downcast_bf16, debug, env.
        current_env: The environment to start from.
        pod: Write the variables for the machines of a pod, as NAME=VALUE in `args.env`, rather than into the
            environment of this machine.

    Returns:
        The settings, and the environment; both new.
    """
    found: dict[str, str] = {}
    if getattr(args, "mixed_precision", None) == "bf16":
        # torch_xla: float is computed as bfloat16; downcast makes double float, and float bfloat16.
        downcast = getattr(args, "downcast_bf16", None)
        found["XLA_DOWNCAST_BF16" if downcast else "XLA_USE_BF16"] = "1"
        env.put(found, "ACCELERATE_DOWNCAST_BF16", bool(downcast))
    if getattr(args, "debug", None):
        found["PT_XLA_DEBUG"] = "1"
    settings = argparse.Namespace(**vars(args))
    # On this machine they are inherited; the machines of a pod get them on their command lines.
    if not pod:
        return settings, {**current_env, **found}
    env.put(found, "ACCELERATE_IN_TPU_POD", True)
    user_variables = list(getattr(args, "env", None) or ())
    settings.env = [*user_variables, *(f"{name}={text}" for name, text in found.items())]
    return settings, dict(current_env)


def tpu_settings(settings: Settings) -> argparse.Namespace:
    """Return effective settings in the form that `prepare_tpu` takes.

    Args:
        settings: The settings.
    """
    return argparse.Namespace(**{name: effective.value for name, effective in settings.items()})
