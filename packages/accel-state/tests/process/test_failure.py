from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import os, sys
from accel_state.process.failure import record_uncaught

record_uncaught()
record_uncaught()
before = sys.excepthook
{body}
raise ValueError("boom")
"""


def run(folder: Path, body: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT.format(body=body)]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )


def test_an_uncaught_exception_is_written_as_torch_does_and_shown_as_ever(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    begin = time.time()
    ended = run(tmp_path, TORCHELASTIC_ERROR_FILE=str(file))
    message = json.loads(file.read_text())["message"]

    assert ended.returncode == 1
    assert ended.stderr.count("ValueError: boom") == 1
    assert message["message"] == "ValueError: boom"
    assert message["extraInfo"]["py_callstack"].endswith("ValueError: boom\n")
    assert begin <= file.stat().st_mtime <= time.time()
    assert int(message["extraInfo"]["timestamp"]) == int(file.stat().st_mtime)


def test_the_time_is_that_of_the_exception_and_not_of_the_end(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    body = (
        "import atexit, time\natexit.register(lambda: open('late', 'w').close())\n"
        "atexit.register(time.sleep, 0.3)"
    )
    run(tmp_path, body, TORCHELASTIC_ERROR_FILE=str(file))

    # A file system keeps times to some milliseconds.
    assert (tmp_path / "late").stat().st_mtime - file.stat().st_mtime >= 0.25


def test_what_was_written_before_stands(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text("first")
    run(tmp_path, TORCHELASTIC_ERROR_FILE="error.json")

    assert (tmp_path / "error.json").read_text() == "first"


def test_a_fork_writes_nothing(tmp_path: Path) -> None:
    body = "if os.fork(): os.wait(); os._exit(0)"
    ended = run(tmp_path, body, TORCHELASTIC_ERROR_FILE="error.json")

    assert "ValueError: boom" in ended.stderr
    assert not (tmp_path / "error.json").exists()


def test_nothing_is_changed_where_nobody_asks(tmp_path: Path) -> None:
    ended = run(tmp_path, "assert sys.excepthook is sys.__excepthook__", TORCHELASTIC_ERROR_FILE="")

    assert "ValueError: boom" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    ended = run(tmp_path, TORCHELASTIC_ERROR_FILE=str(tmp_path / "no" / "folder"))

    assert ended.stderr.rstrip().endswith("ValueError: boom")
    assert ended.stderr.count("Traceback") == 1


def test_a_child_writes_nothing_into_the_file_of_its_parent(tmp_path: Path) -> None:
    body = """
import subprocess
child = "from accel_state.process.failure import record_uncaught; record_uncaught(); raise KeyError('child')"
assert subprocess.run([sys.executable, "-c", child], stderr=subprocess.DEVNULL).returncode == 1
assert not os.path.exists("error.json")
"""
    run(tmp_path, body, TORCHELASTIC_ERROR_FILE="error.json")

    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: boom"


FUNCTION = """
import multiprocessing, os
from accel_state.process.failure import record_uncaught

def worker():
    os.environ["TORCHELASTIC_ERROR_FILE"] = "error.json"
    record_uncaught()
    os._exit(os.environ.get("TORCHELASTIC_ERROR_FILE") != "error.json")

process = multiprocessing.get_context("fork").Process(target=worker)
process.start()
process.join()
raise SystemExit(process.exitcode)
"""


def test_a_process_of_multiprocessing_leaves_the_file_to_what_runs_its_function(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", FUNCTION], cwd=tmp_path, check=False)

    assert ended.returncode == 0  # torch's agent reads the variable when the function has raised
