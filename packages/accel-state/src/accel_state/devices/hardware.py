"""GPUs and the system's kernel, read without CUDA, so that a launcher can still fork."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

from accel_state.logging.warning import warn

# nvidia-smi loads the driver if nothing else has, which takes seconds.
_TIMEOUT_S = 20
_OLDEST_LINUX = (5, 5)  # older ones can hang in distributed training


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of this machine's NVIDIA GPUs and their number, as nvidia-smi lists them.

    CUDA_VISIBLE_DEVICES hides none of them.

    Returns:
        The names in the driver's order, and their number; none without nvidia-smi.

    Raises:
        RuntimeError: If nvidia-smi fails.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], 0
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nvidia-smi did not answer within {_TIMEOUT_S} s. Check the driver.") from None
    if done.returncode != 0:
        # It writes errors to both streams.
        output = (done.stdout + done.stderr).strip()
        raise RuntimeError(f"nvidia-smi ended with {done.returncode}: {output}. Check the driver.")
    # One line for each GPU; the last one ends with a line break.
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return names, len(names)


def check_cuda_p2p_ib_support() -> bool:
    """Return whether NCCL may use peer-to-peer and InfiniBand between this machine's GPUs.

    GeForce cards from the 40 series on cannot reach each other's memory. Where this is False, set
    NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1.

    Returns:
        False if any GPU is such a card, also a hidden one.

    Raises:
        RuntimeError: If nvidia-smi fails.
    """
    names, _ = get_gpu_info()
    return not any(re.search(r"GeForce RTX [4-9]0\d\d\b", name) for name in names)


def check_os_kernel() -> None:
    """Warn if this is Linux with a kernel older than 5.5, under which processes may hang."""
    if platform.system() != "Linux":
        return
    release = platform.release()
    # Distributions append to it: 5.4.0-150-generic.
    match = re.match(r"(\d+)\.(\d+)", release)
    if match and (int(match[1]), int(match[2])) < _OLDEST_LINUX:
        warn(
            f"The Linux kernel is {release}; with one older than 5.5 processes may hang. Update it.",
            about="machine",
        )
