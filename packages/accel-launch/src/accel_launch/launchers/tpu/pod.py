"""Start on all machines of a TPU pod: a launcher on each, through gcloud."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from accel_launch.errors import LaunchError
from accel_launch.launchers.tpu.gcloud import pod_command
from accel_launch.launchers.tpu.variables import prepare_tpu, tpu_settings
from accel_launch.plan.plan import LauncherCommand
from accel_launch.plan.relaunch import accel_launch_command
from accel_launch.settings.redact import redact_text
from accel_launch.settings.resolve import Source

if TYPE_CHECKING:
    from accel_launch.plan.plan import LaunchPlan

# They choose the pod, or apply only to this machine.
_LOCAL_ONLY = (
    *("tpu", "tpu_cluster", "no_tpu_cluster", "tpu_name", "tpu_zone", "tpu_use_sudo", "vm", "env"),
    *("config_file", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
)


def prepare(plan: LaunchPlan, base: Mapping[str, str]) -> LauncherCommand:
    """Return the gcloud command that starts a launcher on each machine of the pod.

    The script must be there, at the same path from the home folder; `accel tpu-config` can put it there.

    Args:
        plan: What to start.
        base: This process's environment.

    Raises:
        LaunchError: If the pod is not named, or a variable for it is not NAME=VALUE.
    """
    value = plan.settings.value
    if value("vm"):
        warnings.warn("--vm is ignored: gcloud reaches every machine of a pod by its name.", stacklevel=2)
    settings, _ = prepare_tpu(tpu_settings(plan.settings), {}, pod=True)
    exports = [f"export {_assignment(text)};" for text in settings.env]
    program = [*(["sudo", "-E"] if value("tpu_use_sudo") else []), "accel"]
    pod_launch = accel_launch_command(
        plan, without=_LOCAL_ONLY, program=program, sources=(Source.FLAG, Source.CONFIG)
    )
    at = len(program) + 1
    # On the pod it is a machine with TPUs: as a pod it would start itself again through gcloud.
    pod_launch[at:at] = ["--tpu", "--no_tpu_cluster"]
    return LauncherCommand(
        pod_command(value("tpu_name"), value("tpu_zone"), " ".join([*exports, shlex.join(pod_launch)])),
        dict(base),
        f"a launcher on each machine of the TPU pod {value('tpu_name')}",
    )


def _assignment(text: str) -> str:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise LaunchError(f"--env {redact_text(text)!r} is not allowed; allowed: NAME=VALUE.")
    return f"{name}={shlex.quote(value)}"
