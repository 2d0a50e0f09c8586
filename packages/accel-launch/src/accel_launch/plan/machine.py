"""The GPUs and CPU cores of this machine, found without torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """The processors of this machine.

    Args:
        gpus: Number of GPUs, hidden ones included.
        cores: CPU cores that this process may run on.
    """

    gpus: int
    cores: int

    @classmethod
    def detect(cls, root: Path = Path("/")) -> Machine:
        """Look at this machine.

        Args:
            root: The file system's root.
        """
        return cls(_nvidia(root) or _amd(root), _cores())

    def visible_gpus(self, mask: str | None) -> tuple[str, ...]:
        """Return the GPUs that a process sees under a CUDA_VISIBLE_DEVICES.

        Args:
            mask: Comma-separated indices or identifiers; None where the variable is unset.

        Returns:
            The indices or identifiers. As in CUDA, what follows the first index that is too high is hidden.
        """
        if mask is None or not self.gpus:
            return tuple(map(str, range(self.gpus)))
        seen: list[str] = []
        for item in (text.strip() for text in mask.split(",")):
            if not item or item.startswith("-") or (item.isdigit() and int(item) >= self.gpus):
                break
            seen.append(item)
        return tuple(seen)


def _cores() -> int:
    # Containers and Slurm bind a process to some of the cores. macOS has no such call.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _nvidia(root: Path) -> int:
    """Count NVIDIA GPUs: their device files, which is instant; else nvidia-smi where a driver is (WSL)."""
    # nvidia0, nvidia1 ... are GPUs; nvidiactl, nvidia-uvm and others belong to the driver.
    names = [path.name for path in (root / "dev").glob("nvidia*")]
    count = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in names)
    # Without a driver nvidia-smi is not started, which takes a second; dxg is the driver under WSL.
    if count or not (names or (root / "dev/dxg").exists()):
        return count
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _amd(root: Path) -> int:
    """Count AMD GPUs: the topology nodes of the kernel driver that have SIMD units."""
    count = 0
    for properties in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        match = re.search(r"^simd_count (\d+)", properties.read_text(encoding="utf-8"), re.MULTILINE)
        count += match is not None and int(match[1]) > 0
    return count
