"""The page on observability: its programs run as they stand there, and its tables are true."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from accel.commands.replay import replay_command, replay_command_parser
from accel.observe.report.read import read_runs
from accel.trackers.base import GeneralTracker
from accel.trackers.registry import TRACKERS, tracker_class
from accel_world.leaks import reset_singletons
from accel_world.program import run_program

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "observability.md").read_text()
SVG = "{http://www.w3.org/2000/svg}"
BLOCKS = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def shape(text: str) -> list[str]:
    """What of a profile's summary is the same on every machine: its lines without operators and numbers."""
    # Any operator may be among the first: a busy machine lengthens whatever it interrupts.
    lines = re.sub(r"^(?!all ).+?(?= +\d+ +[\d.]+ )", "OPERATOR", text, flags=re.MULTILINE).splitlines()
    return [re.sub(r"[\d,]*\d[\d.]*", "0", re.sub(r" +", " ", line)) for line in lines]


@pytest.mark.usefixtures("fresh_state")
def test_the_programs_print_and_write_what_the_page_shows(tmp_path, monkeypatch, capsys):
    from accel.trackers import registry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "REGISTERED", {})
    names = {"__name__": "page"}
    for kind, text in BLOCKS:
        if kind == "python":
            exec(compile(text, "observability.md", "exec"), names)
        elif text.startswith("{"):
            shown = [json.loads(line) for line in text.splitlines()]
            written = [json.loads(line) for line in Path("runs/digits.jsonl").read_text().splitlines()]
            assert [line | {"time": 0} for line in written] == [line | {"time": 0} for line in shown]
        elif text.startswith("Profile:"):
            assert shape(capsys.readouterr().out) == shape(text)
            assert json.loads(Path("traces/profile_0.json").read_text())["traceEvents"]
        elif not text.startswith(("Profile, ", "51 steps")):  # of two processes, which the next test runs
            assert capsys.readouterr().out == text

    assert {kind for kind, _ in BLOCKS} == {"python", "text"}


def test_the_summary_of_two_processes(world, tmp_path, monkeypatch):
    (program,) = (text for kind, text in BLOCKS if kind == "python" and "profile()" in text)
    (shown,) = (text for kind, text in BLOCKS if text.startswith("Profile, "))
    script = tmp_path / "program.py"
    script.write_text(program.replace('"traces"', repr(str(tmp_path / "traces"))))
    printed = world.run(run_program, str(script), size=2, init=False, timeout_s=100)

    assert shape("".join(printed)) == shape(shown)
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "profile_0.json",
        "profile_1.json",
    ]


def test_the_table_lists_every_tracker_with_what_it_has():
    rows = re.findall(r'^\| `"(\w+)"` \|.*\| (yes|) *\| (yes|) *\|$', PAGE, flags=re.MULTILINE)

    assert sorted(name for name, _, _ in rows) == sorted(TRACKERS)
    for name, has_images, has_tables in rows:
        kind = tracker_class(name)
        assert (kind.log_images is not GeneralTracker.log_images) == bool(has_images)
        # A tracker takes whole tables, or the rows that its base has checked.
        methods = ("log_table", "_log_rows")
        own = any(getattr(kind, method) is not getattr(GeneralTracker, method) for method in methods)
        assert own == bool(has_tables)


def test_accel_verify_prints_what_the_page_shows(tmp_path):
    """Numbers may differ in their last digit between processors; distances of rounding are rounding."""
    program = re.search(r'^```python file="train.py" .*?\n(.*?)^```$', PAGE, flags=re.MULTILINE | re.DOTALL)
    console = re.search(r"^```console .*?\n(\$ accel verify.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert program is not None
    assert console is not None
    (tmp_path / "train.py").write_text(program[1])
    codes = []
    for part in console[1].split("$ accel ")[1:]:
        arguments, _, shown = part.partition("\n")
        verify, *rest = arguments.split()
        command = [sys.executable, "-m", "accel_launch", verify, "--json=found.json", *rest]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
        found = json.loads((tmp_path / "found.json").read_text())
        codes.append((ran.returncode, found["same"], found["num_processes"], len(found["rows"])))
        assert without_numbers(ran.stdout) == without_numbers(shown), ran.stderr
        assert numbers(ran.stdout) == pytest.approx(numbers(shown), rel=1e-3, abs=1e-5)
    assert codes == [(1, False, 2, 3), (0, True, 2, 3)]


def without_numbers(text):
    return re.sub(r" *[0-9.]+(e-\d+)?", " #", text)


def numbers(text):
    return [float(item) for item in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", text)]


def run_with_errors(path: str) -> tuple[str, str]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        printed = run_program(path)
    return printed, said.getvalue()


def test_where_the_time_goes(world, tmp_path):
    (shown,) = (text for kind, text in BLOCKS if text.startswith("51 steps"))
    program = (DOCS / "slow_process.py").read_text()
    script = tmp_path / "program.py"
    script.write_text(program.replace('"runs/slow', f'"{tmp_path}/runs/slow'))
    (printed, said), other = world.run(run_with_errors, str(script), size=2, init=False, timeout_s=100)
    assert other == ("", "")
    assert shape(printed) == shape(shown)
    (warning,) = re.findall(
        r"^```text .*?\n(UserWarning: Process 1 is slow.*?)\n```$", PAGE, flags=re.MULTILINE | re.DOTALL
    )
    assert shape(re.sub(r"\s+", " ", warning))[0] in shape(said)[0]

    (run,) = read_runs(tmp_path / "runs/slow/sums.jsonl")
    drawn = ElementTree.fromstring(runpy.run_path(str(DOCS / "draw_report.py"))["picture"](run))
    bars = [float(bar.get("width")) for bar in drawn.iter(f"{SVG}rect") if bar.get("class") == "data"]
    seconds = [own["seconds"]["data"] for own in run.summary["ranks"]]
    assert len(bars) == 2
    assert bars[1] / bars[0] == pytest.approx(seconds[1] / seconds[0], rel=0.01)
    assert [curve.get("aria-label") for curve in drawn.iter(f"{SVG}svg")][1:] == [
        "loss",
        "statistics/samples_per_second",
    ]


def test_the_report_of_a_run_that_hangs(launched):
    """One process reports, and both end."""
    section = PAGE.partition("## Why does it hang?")[2]
    (script,) = re.findall(
        r'^```python file="hang.py" .*?\n(.*?)^```$', section, flags=re.MULTILINE | re.DOTALL
    )
    (shown,) = re.findall(
        r"^```console .*?\n(\$ accel launch .*?)^```$", section, flags=re.MULTILINE | re.DOTALL
    )
    command, _, reports = shown.partition("\n")
    arguments = command.partition("--num_processes 2 ")[2].split()[:-1]
    run = launched(script, launch_args=arguments)

    assert run.returncode == 1
    places = re.sub(r"at \S+/script.py", "at hang.py", run.stderr)
    assert reports.partition(" of 2: ")[2] in places  # by either process
    assert places.count("Watchdog, process ") == 1
    summary = run.stderr.partition("accel launch: rank ")[2]
    assert (
        "StuckCollectiveError: an operation has waited for longer than 1 s. Operation 1: arrived: 1"
        in summary
    )


@pytest.mark.usefixtures("fresh_state")
def test_a_loss_that_is_not_finite_is_recomputed_as_the_page_shows(tmp_path, monkeypatch, capsys):
    program = re.search(r'^```python file="guarded.py" .*?\n(.*?)^```$', PAGE, flags=re.MULTILINE | re.DOTALL)
    console = re.search(
        r"^```console .*?\n\$ python guarded.py\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL
    )
    assert program is not None
    assert console is not None
    first, command, second = re.split(r"^\$ accel replay (.*)\n", console[1], flags=re.MULTILINE)
    script = tmp_path / "guarded.py"
    script.write_text(program[1])
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "argv", [str(script)])
        patch.setattr(sys, "path", [*sys.path])
        patch.setenv("ACCELERATE_REPLAY", "")
        threads = torch.get_num_threads()
        runpy.run_path(str(script), run_name="__main__")
        assert without_numbers(capsys.readouterr().out) == without_numbers(first)
        reset_singletons()
        code = replay_command(replay_command_parser().parse_args(command.split()))
        torch.set_num_threads(threads)
    replayed = capsys.readouterr().out
    # Bits of what a processor computes may differ from those of another; not from themselves.
    assert without_numbers(re.sub(r"0x\w+", "0", replayed)) == without_numbers(re.sub(r"0x\w+", "0", second))
    assert code == 0
