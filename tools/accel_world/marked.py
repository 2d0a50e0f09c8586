"""The processes of one launched run, found by a mark in their environment: dumps their stacks, kills them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

__all__ = ["MARK", "STACKS", "end", "find", "stacks"]

MARK = "ACCEL_TEST_RUN"  # set to the run's own value in every process, however it was started
STACKS = "ACCEL_TEST_STACKS"  # the folder of the stacks; read by site/sitecustomize.py
STACKS_SIGNAL = signal.SIGRTMAX - 1  # as there
STACKS_S = 2.0  # for the processes to write their stacks


def find(mark: str) -> list[int]:
    """Return the ids of the run's processes; no new session or parent hides one."""
    return sorted(int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _is_marked(folder, mark))


def stacks(mark: str, folder: Path) -> str:
    """Ask every Python process of the run where it is, and return their answers."""
    files = {pid: folder / f"{pid}.stack" for pid in find(mark)}
    files = {pid: file for pid, file in files.items() if file.exists()}
    for pid in files:
        _signal(pid, STACKS_SIGNAL)
    until = time.monotonic() + STACKS_S
    sizes: list[int] = []
    while time.monotonic() < until:
        time.sleep(0.1)
        previous, sizes = sizes, [file.stat().st_size for file in files.values()]
        if sizes == previous and all(sizes):
            break
    texts = {pid: file.read_text(errors="replace") for pid, file in files.items()}
    return "\n".join(f"[process {pid}: {_command(pid)}]\n{text}" for pid, text in texts.items())


def end(mark: str, patience_s: float) -> list[str]:
    """Wait a moment for the run's processes to end, kill the rest and say which they were."""
    until = time.monotonic() + patience_s
    while (pids := find(mark)) and time.monotonic() < until:
        time.sleep(0.02)
    left = [f"process {pid}: {_command(pid)}" for pid in pids]
    while pids := find(mark):  # again: one may have started another meanwhile
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.01)
    return left


def _is_marked(folder: Path, mark: str) -> bool:
    try:
        variables = (folder / "environ").read_bytes().split(b"\0")  # none for a zombie
    except OSError:  # it ended, or is another user's
        return False
    return f"{MARK}={mark}".encode() in variables


def _command(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "ended"
    return command.replace(b"\0", b" ").decode(errors="replace").strip()[:200]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
