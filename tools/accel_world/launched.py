"""Run a script under a real launcher, with a time limit, and leave nothing of it behind."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from accel_world import marked
from accel_world.environment import base_environment
from accel_world.guard import Guard
from accel_world.ports import lease_port
from accel_world.report import describe_exit

__all__ = ["LaunchFailure", "LaunchedRun", "launch"]

SITE = Path(__file__).parent / "site"
ORPHAN_S = 5.0  # how long a process may outlive its launcher
LAUNCHERS = ("accel", "accelerate", "python", "torchrun")


class LaunchFailure(AssertionError):
    """A launched run did not end in time, or left processes running."""


@dataclass(frozen=True)
class LaunchedRun:
    """A run that ended without being killed."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float  # wall time


def launch(
    guard: Guard,
    folder: Path,
    script: str | Path,
    *script_args: str,
    num_processes: int = 2,
    launcher: str = "accel",
    launch_args: Sequence[str] = (),
    python: str = sys.executable,
    env: Mapping[str, str | None] | None = None,
    timeout_s: float = 180,
) -> LaunchedRun:
    """Run a script under a launcher, in its own session, and wait for all of its processes.

    Args:
        guard: What ends the run if this process is killed meanwhile.
        folder: An empty folder: the run's working folder, caches and output.
        script: A path, or the source of the script (a string with a line break).
        *script_args: The script's own arguments.
        num_processes: How many processes to start; "python" always starts one.
        launcher: "accel" or "accelerate" (the console scripts), "python" or "torchrun".
        launch_args: Further options of the launcher.
        python: The Python of "accelerate", "python" and "torchrun".
        env: Environment variables to add; None removes one.
        timeout_s: Seconds until every process of the run is killed.

    Returns:
        What the launcher returned and printed.

    Raises:
        LaunchFailure: If the run took too long, or left processes behind.
        ValueError: If the launcher is unknown.
    """
    __tracebackhide__ = True
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher must be one of {', '.join(LAUNCHERS)}, got {launcher!r}")
    path = _script_file(folder, script)
    mark = uuid.uuid4().hex
    with lease_port() if num_processes > 1 else nullcontext(0) as port:
        command = [
            *_launcher(launcher, num_processes, port, launch_args, python),
            str(path),
            *map(str, script_args),
        ]
        begin = time.monotonic()
        with guard.watch(mark):
            returncode, stacks = _run(command, folder, _environment(folder, mark, env or {}), timeout_s)
            seconds = time.monotonic() - begin
            left = marked.end(mark, ORPHAN_S)
    stdout, stderr = ((folder / name).read_text(errors="replace") for name in ("stdout.txt", "stderr.txt"))
    print(stdout, end="")
    print(stderr, end="", file=sys.stderr)
    if returncode is None:
        raise LaunchFailure(f"{' '.join(command)}\ndid not end within {timeout_s} s:\n{stderr}\n{stacks}")
    if left:
        ended = describe_exit(returncode)
        raise LaunchFailure(f"{' '.join(command)}\nended ({ended}) and left running:\n" + "\n".join(left))
    return LaunchedRun(returncode, stdout, stderr, seconds)


def _script_file(folder: Path, script: str | Path) -> Path:
    if isinstance(script, Path) or "\n" not in script:
        return Path(script).resolve()
    path = folder / "script.py"
    path.write_text(script)
    return path


def _launcher(
    launcher: str, num_processes: int, port: int, launch_args: Sequence[str], python: str
) -> list[str]:
    count, address = str(num_processes), ["127.0.0.1", str(port)]
    if launcher == "python":
        return [python, *launch_args]
    if launcher == "torchrun":
        place = ["--master_addr", address[0], "--master_port", address[1]] if port else []
        return [
            python,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            count,
            *place,
            *launch_args,
        ]
    place = ["--main_process_ip", address[0], "--main_process_port", address[1]] if port else []
    scripts = Path(sysconfig.get_path("scripts") if launcher == "accel" else Path(python).parent)
    console_script = str(scripts / launcher)
    return [console_script, "launch", "--num_processes", count, *place, *launch_args]


def _environment(folder: Path, mark: str, env: Mapping[str, str | None]) -> dict[str, str]:
    places = [str(SITE), env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")]
    environment: dict[str, str | None] = {
        **base_environment(),
        "ACCELERATE_USE_CPU": "true",
        "HF_HOME": str(folder / "cache"),  # where a user's own default config would be found
        "XDG_CACHE_HOME": str(folder / "cache"),
        **env,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        marked.MARK: mark,
        marked.STACKS: str(folder),
    }
    return {key: value for key, value in environment.items() if value is not None}


def _run(
    command: list[str], folder: Path, environment: dict[str, str], timeout_s: float
) -> tuple[int | None, str]:
    """Run to the end and return the exit code; past the limit, return None and everyone's stacks."""
    mark = environment[marked.MARK]
    (folder / "work").mkdir()
    # Files, not pipes: an orphan would keep a pipe open.
    with (folder / "stdout.txt").open("wb") as stdout, (folder / "stderr.txt").open("wb") as stderr:
        process = subprocess.Popen(
            command,
            cwd=folder / "work",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        return process.wait(timeout_s), ""
    except subprocess.TimeoutExpired:
        return None, marked.stacks(mark, folder)
    finally:
        if process.poll() is None:  # too slow, or the test was interrupted
            marked.end(mark, patience_s=0)
            process.kill()
            process.wait()
