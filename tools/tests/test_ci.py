"""What `.ci/run` says when it is stopped, with a first step that waits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci/run"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_a_failure(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(RUN, tmp_path / ".ci/run")
    os.mkfifo(tmp_path / "started")
    os.mkfifo(tmp_path / "go")
    first = tmp_path / "bin/python3"
    first.write_text(f"#!/bin/sh\necho here > {tmp_path}/started\nread line < {tmp_path}/go\n")
    first.chmod(0o755)
    run = subprocess.Popen(
        ["bash", str(tmp_path / ".ci/run")],
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        # Tests may run under nohup or in the background, where these signals are ignored.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    (tmp_path / "started").read_text()
    run.send_signal(number)
    (tmp_path / "go").write_text("end well\n")
    out, _ = run.communicate(timeout=60)

    assert run.returncode == 128 + number
    assert out.splitlines()[-1] == "ci: FAILED"
