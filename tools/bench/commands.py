"""Runs commands in fresh processes, and measures the CPU and wall time of each."""

from __future__ import annotations

import resource
import subprocess
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from .workers import quiet_environment

__all__ = ["Cost", "console_script", "run"]

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Cost:
    """What a command and all its children used, in seconds, and what it printed."""

    cpu_s: float
    wall_s: float
    stdout: str
    stderr: str


def console_script(name: str) -> str | None:
    """Return the path of a script installed with this interpreter's packages, if it is there."""
    path = Path(sysconfig.get_path("scripts")) / name
    return str(path) if path.exists() else None


def run(command: list[str]) -> Cost:
    """Run a command to its end.

    Raises:
        RuntimeError: If its exit code is not 0; the message has its output.
    """
    with tempfile.TemporaryDirectory() as home:
        before = _children_cpu_s()
        start = time.perf_counter()
        done = subprocess.run(
            command, env=quiet_environment(Path(home)), capture_output=True, text=True, timeout=TIMEOUT_S
        )
        wall_s = time.perf_counter() - start
        cpu_s = _children_cpu_s() - before
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return Cost(cpu_s, wall_s, done.stdout, done.stderr)


def _children_cpu_s() -> float:
    # Of every child that has ended, with its own children: between two readings that is one command.
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
