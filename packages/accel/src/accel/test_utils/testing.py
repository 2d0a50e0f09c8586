"""Helpers of test suites: the device to test on, and commands as processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence

from accel_state.devices.table import detect


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the device type to test on.

    Returns:
        Its name; the number of devices, 1 for the CPU; and a function that returns the bytes which tensors
        take on the current device, 0 for the CPU.
    """
    device = detect()
    return device.type, device.count(), device.memory_allocated


def run_command(
    command: Sequence[str], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a command, and wait for its end.

    Args:
        command: The program and its arguments.
        return_stdout: Whether to return what the command wrote to stdout.
        env: Its environment; that of this process by default.

    Returns:
        The text, if requested.

    Raises:
        RuntimeError: If the command fails: the command, its exit code and what it wrote.
    """
    command = [str(word) for word in command]
    run = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if not return_stdout else subprocess.PIPE,
        env=env,
        text=True,
        errors="replace",
    )
    if run.returncode:
        raise RuntimeError(
            f"The command `{' '.join(command)}` ended with exit code {run.returncode}:\n"
            f"{run.stdout}{run.stderr or ''}"
        )
    return run.stdout if return_stdout else None
