"""A save that is killed anywhere, or meets a full disk, leaves the newest complete checkpoint to load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interrupted_run.py")

# Mode, processes, which of them is interrupted, and how many points there are at least: over 100 of kills in
# blocking saves.
CASES = [
    pytest.param("kill", 1, 0, 60, id="kill"),
    pytest.param("async", 1, 0, 60, id="kill in the background"),
    pytest.param("full", 1, 0, 40, id="full disk"),
    pytest.param("size", 1, 0, 10, id="file size limit"),
    pytest.param("kill", 2, 0, 40, id="kill rank 0 of 2"),
    pytest.param("kill", 2, 1, 8, id="kill rank 1 of 2"),
    pytest.param("kill in place", 1, 0, 60, id="kill in place"),
    pytest.param("kill past the cache", 1, 0, 10, id="kill past the cache"),
    pytest.param("EIO", 1, 0, 10, id="error"),
    pytest.param("ENOSPC in place", 1, 0, 8, id="disk full in place"),
    pytest.param("EACCES in place", 2, 0, 8, id="no permission in place, rank 0 of 2"),
    pytest.param("parts", 2, 1, 12, id="kill rank 1 of 2, each with its part"),
]


@pytest.fixture(scope="module")
def runs() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported what the runs need, and forks them."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, str(SCRIPT)], stdin=pipe, stdout=pipe, text=True) as process:
        yield process


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mode", "processes", "victim", "points"), CASES)
def test_the_newest_complete_checkpoint_is_resumed_bit_for_bit(
    runs: subprocess.Popen[str], tmp_path: Path, mode: str, processes: int, victim: int, points: int
) -> None:
    assert runs.stdin is not None
    assert runs.stdout is not None
    runs.stdin.write(f"{tmp_path}\t{mode}\t{processes}\t{victim}\n")
    runs.stdin.flush()
    newest = runs.stdout.readline().split()
    assert newest, (tmp_path / "stderr").read_text()

    # The old one up to a point, the new one from there on; the last save was not interrupted.
    assert len(newest) > points
    assert newest[-1] == "checkpoint_1"
    assert "checkpoint_0" in newest
    if mode in ("kill", "parts", "kill in place", "ENOSPC in place", "EACCES in place"):
        assert newest == sorted(newest)
