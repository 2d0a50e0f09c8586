"""Start `accel launch` so that a test can send signals and look at its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

MARK = "ACCEL_LAUNCH_TEST"


class Started:
    """A launcher under test with everything that it started."""

    def __init__(
        self, folder: Path, arguments: tuple[str, ...], env: Mapping[str, str], **popen: Any
    ) -> None:
        self.folder = folder
        # Of its own: a launcher that a test kills leaves its folder there.
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        code = "import sys; from accel_launch.cli import main; sys.exit(main())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=folder,
            env={**clean_environment(folder), "TMPDIR": str(self.temporary), MARK: self.mark, **env},
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},
        )

    def pids(self) -> list[int]:
        """Return the ids of every living process of the run, the launcher's included."""
        entry = f"{MARK}={self.mark}".encode()
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if entry in _environ(path)]

    def wait_for_file(self, name: str, timeout_s: float = 100) -> Path:
        path = self.folder / name
        self.wait_until(path.exists, f"{name} to appear", timeout_s)
        return path

    def wait_until(self, true: Callable[[], bool], what: str, timeout_s: float = 100) -> None:
        until = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > until:
                pytest.fail(f"waited {timeout_s} s for {what}")
            time.sleep(0.01)

    def finish(self, timeout_s: float = 150) -> tuple[int, str, str]:
        """Wait for the launcher, which tidies up, and return its exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        assert not list(self.temporary.glob("accel-launch-*"))
        return self.process.returncode, (out or b"").decode(), (err or b"").decode()

    def assert_nothing_left(self, timeout_s: float = 20) -> None:
        self.wait_until(lambda: not self.pids(), "every process to end", timeout_s)

    def kill(self) -> None:
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr, self.process.stdin):
            if stream is not None:
                stream.close()


def clean_environment(folder: Path) -> dict[str, str]:
    keep = ("PATH", "HOME", "PYTHONPATH", "LANG", "VIRTUAL_ENV")
    environ = {name: text for name, text in os.environ.items() if name in keep}
    return {**environ, "HF_HOME": str(folder / "hf")}


def _environ(path: Path) -> list[bytes]:
    try:
        return (path / "environ").read_bytes().split(b"\0")  # empty for a zombie
    except OSError:
        return []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Start `accel` with arguments; a source text as `script` is written to script.py and appended."""
    runs: list[Started] = []
    # Under nohup SIGHUP is ignored, in a script's background SIGINT, and would be by all that a test starts.
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)

    def starter(
        *arguments: str, script: str | None = None, env: Mapping[str, str] | None = None, **popen: Any
    ) -> Started:
        if script is not None:
            (tmp_path / "script.py").write_text(script)
            arguments = (*arguments, "script.py")
        runs.append(Started(tmp_path, arguments, env or {}, **popen))
        return runs[-1]

    yield starter
    for run in runs:
        run.kill()
    signal.signal(signal.SIGHUP, hangup)
    signal.signal(signal.SIGINT, interrupt)
