"""The commands for GPUs where there is none: they say so in their last line, and do not pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = [sys.executable, "tools/run_gpu_tests.py"]
BENCH = [sys.executable, "-m", "tools.bench.gpu"]


def run(command: list[str]) -> tuple[int, str, str]:
    """Return the exit code, stdout, and the last line."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    return done.returncode, done.stdout, (done.stdout.splitlines() or [""])[-1]


def test_without_a_gpu_the_tests_are_counted_and_nothing_passes() -> None:
    code, out, last = run([*TESTS, "packages/accel-state/tests/devices"])

    assert code == 5
    line = r"gpu: no accelerator found by torch \S+; [1-9]\d* tests collected, none run"
    assert re.fullmatch(line, last), out


def test_a_test_that_cannot_be_collected_is_the_error(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module_at_all\n")
    code, out, last = run([*TESTS, str(tmp_path)])

    assert code == 2
    assert "no_such_module_at_all" in out
    assert "no accelerator found" not in last


def test_without_a_gpu_no_section_of_the_bench_is_measured() -> None:
    for sections, count in ([], 7), (["step", "async"], 2):
        code, out, last = run([*BENCH, *sections])

        assert code == 5
        assert last.endswith(f"; {count} sections of the bench, none run"), out
    code, _, _ = run([*BENCH, "--device", "cpu", "--write"])
    assert code == 2
