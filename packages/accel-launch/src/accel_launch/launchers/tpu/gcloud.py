"""The gcloud command that runs something on the machines of a TPU pod."""

from __future__ import annotations

from accel_launch.errors import LaunchError


def pod_command(name: str | None, zone: str | None, command: str) -> list[str]:
    """Return the command, as Google documents it for TPU VMs.

    Args:
        name: The TPU's name.
        zone: Its zone.
        command: What a shell on every machine runs.

    Raises:
        LaunchError: If the name or the zone is missing.
    """
    missing = [flag for flag, value in (("--tpu_name", name), ("--tpu_zone", zone)) if not value]
    if missing:
        raise LaunchError(
            f"A TPU pod is reached by its name and zone; missing: {', '.join(missing)}. Give the flag, or "
            "the key of that name in the config file."
        )
    # --worker=all: one connection to each machine of the pod, all at the same time.
    ssh = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", str(name), f"--zone={zone}", "--worker=all"]
    return [*ssh, f"--command={command}"]
