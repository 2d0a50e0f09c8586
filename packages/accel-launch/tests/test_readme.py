"""The example of the README, as a reader types it."""

import os
import subprocess
import sys
from pathlib import Path

from accel_world import readme

_, EXAMPLE = readme.examples(__file__, "bash")


def test_the_example_starts_two_processes(tmp_path):
    assert readme.num_lines(EXAMPLE) <= readme.MOST_LINES
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # accel-launch alone brings the same command under its own name; `accel` is the umbrella's.
    run = subprocess.run(
        ["bash", "-ec", EXAMPLE.replace("accel launch", "accel-launch")],
        cwd=tmp_path,
        # Unbuffered, each writes the end of its line apart, and the other may come between.
        env={**os.environ, "PATH": path, "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
