"""The benchmark's own arithmetic and bookkeeping; what it measures is measured by running it."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import pytest

from bench import __main__ as command
from bench.launch import _outlives_s
from bench.row import Row
from bench.table import (
    BEGIN,
    BESIDE_ACCELERATE,
    END,
    HEADLINES,
    beside_accelerate,
    cells,
    headlines,
    read,
    recorded_setting,
    render,
    replaced,
    write,
)
from bench.timing import BASELINE, differences, interleave, median_limits, ratios, timed
from bench.workers import run_workers

ROOT = Path(__file__).parents[2]


def test_contestants_take_turns_in_an_order_that_changes_and_repeats():
    runs = []
    for _ in range(2):  # as two ranks would
        calls = []
        measures = {name: lambda name=name, calls=calls: calls.append(name) or 1.0 for name in "abc"}
        samples = interleave(measures, rounds=20, warmup=1)
        runs.append(calls)

    assert samples == {name: [1.0] * 20 for name in "abc"}  # the warm-up is not counted
    rounds = ["".join(runs[0][start : start + 3]) for start in range(0, 63, 3)]
    assert {"".join(sorted(order)) for order in rounds} == {"abc"}
    assert len(set(rounds)) == 6  # every order comes up
    assert runs[0] == runs[1]


def test_ratios_are_taken_within_each_round():
    """A machine that becomes ten times slower half way changes every time and no ratio."""
    base = [1.0, 1.0, 10.0, 10.0]
    samples = {BASELINE: base, "other": [1.5 * seconds for seconds in base]}

    assert ratios(samples)["other"].to_dict() == {"median": 1.5, "low": 1.5, "high": 1.5}
    assert ratios(samples, over="other")[BASELINE].median == pytest.approx(1 / 1.5)
    assert differences(samples)["other"].median == pytest.approx((0.5 + 5.0) / 2)


def test_the_limits_of_a_median_close_in_as_values_come():
    values = [float(value) for value in range(1001)]
    low, high = median_limits(values)
    assert 430 < low < 500 < high < 570  # 500 -+ 31, by the binomial distribution
    few_low, few_high = median_limits(values[::100])
    assert few_high - few_low > 3 * (high - low)
    assert median_limits(values) == (low, high)


def test_timed_is_the_time_of_one_call(monkeypatch):
    clock = count(start=0.0, step=6.0)
    monkeypatch.setattr("bench.timing.time.perf_counter", lambda: next(clock))
    calls = []

    assert timed(lambda: calls.append(1), calls=3)() == 2.0
    assert len(calls) == 4  # the first is not counted


@pytest.mark.parametrize(
    ("row", "passed"),
    [
        (Row("a", 1.0, 1.0), True),
        (Row("a", 1.1, 1.0), False),
        (Row("a", 10.0, 10.0, at_least=True), True),
        (Row("a", 9.9, 10.0, at_least=True), False),
        (Row("a", 0.1, 0.2, condition=("torch not imported", False)), False),
        (Row("a", 0.1, 0.2, condition=("torch not imported", True)), True),
        (Row("a", float("nan"), 1.0), False),
    ],
)
def test_a_row_passes_within_its_limit_and_condition(row, passed):
    assert row.passed is passed
    assert ("FAIL" in render(cells([row]))) is not passed


def test_the_table_shows_peers_in_their_columns():
    rows = [Row("a", 1.0, 2.0, peers={"lightning-fabric": 3.0}), Row("b", 1.0, 2.0)]
    lines = render(cells(rows)).splitlines()

    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert found[2][:6] == ["a", "1.000 x", "<= 2 x", "pass", "", "3.000 x"]
    assert len({len(line) for line in lines}) == 1


def test_a_section_that_fails_is_named_and_the_others_are_measured(monkeypatch, tmp_path, capsys):
    def broken(*, quick):
        raise RuntimeError("worker died\nand the rest of its log")

    page, front, migrate = (tmp_path / name for name in ("page.md", "front.md", "migrate.md"))
    for empty in (page, front):
        empty.write_text(f"{BEGIN}\n{END}\n")
    migrate.write_text("".join(command.COMPARISON))
    sections = {"broken": broken, "one": lambda *, quick: Row("a", 1.0, 2.0)}
    monkeypatch.setattr(command, "SECTIONS", {**sections, "two": lambda *, quick: [Row("b", 1.0, 2.0)]})
    monkeypatch.setattr(command, "PAGE", page)
    monkeypatch.setattr(command, "README", front)
    monkeypatch.setattr(command, "MIGRATE", migrate)
    monkeypatch.setattr(sys, "argv", ["bench", "--write"])

    assert command.main() == 1
    lines = [line.strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [(cells[0].strip(), cells[3].strip()) for cells in lines[2:]]
    broken_row = ("section broken did not run: RuntimeError: worker died", "FAIL")
    assert cells == [("a", "pass"), ("b", "pass"), broken_row]
    told = capsys.readouterr().err
    assert "and the rest of its log" in told
    assert "measuring two ... 0 s" in told

    monkeypatch.setattr(sys, "argv", ["bench", "one", "two"])
    assert command.main() == 0


def test_the_readme_shows_what_the_table_has_and_every_miss_with_a_mark():
    table = read(command.PAGE)
    shown = (ROOT / "README.md").read_text().split(BEGIN)[1].split(END)[0]

    assert shown == f"\n\n{recorded_setting(command.PAGE)}\n\n{headlines(table)}\n\n"
    missed = {line[0] for line in table if line[3] == "FAIL"}
    marked = {line.split(" | ")[0].strip("| ") for line in shown.splitlines() if "**missed**" in line}
    assert missed == marked
    assert not any("TensorDataset" in name for name in HEADLINES)


def test_headlines_are_all_rows_that_miss_next_to_those_that_are_chosen():
    rows = [
        Row("other", 3.0, 2.0),
        Row("quiet", 1.0, 2.0),
        Row(HEADLINES[1], 1.0, 2.0, peers={"accelerate": 4.0}),
    ]

    assert headlines(cells(rows, {"broken": "died"})).splitlines()[2:] == [
        f"| {HEADLINES[1]} | 1.000 x | <= 2 x | met | 4.000 x |",
        "| other | 3.000 x | <= 2 x | **missed** |  |",
        "| section broken did not run: died |  |  | **missed** |  |",
    ]


def test_the_comparison_with_accelerate_is_that_of_the_table():
    text = command.MIGRATE.read_text()
    begin, end = command.COMPARISON

    assert text.partition(begin)[2].partition(end)[0] == beside_accelerate(read(command.PAGE))


def test_what_takes_less_time_than_accelerate_is_said_in_words():
    def row(name: str, value: float, **more: object) -> Row:
        return Row(BESIDE_ACCELERATE[name], value, 1.0, **more)

    rows = [
        row("a training step", 1.0, peers={"accelerate": 2.0}),
        row("dispatched batches", 3.0),
        row("`save_state`", 1.0, peers={"accelerate": 1.05}),
        row("`load_state` from the disk", 0.5),
    ]
    assert beside_accelerate(cells(rows)) == (
        "Measured against accelerate, accel takes less time for a training step and dispatched batches; "
        "about as much time for `save_state`; more time for `load_state` from the disk"
    )


def test_sections_that_are_measured_again_replace_their_rows(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    old = [Row("a", 1.0, 2.0), Row("b", 1.0, 2.0), Row("c", 1.0, 2.0)]
    write(page, render(cells(old, {"late": "died"})), "machine")
    new = cells(
        [Row("b, ordinary", 1.5, 2.0), Row("b", 1.6, 2.0), Row("b, more", 1.7, 2.0), Row("z", 1.8, 2.0)]
    )

    found = replaced(read(page), new, ["middle", "late"])

    values = [(line[0], line[1]) for line in found]
    ordered = [("b, ordinary", "1.500 x"), ("b", "1.600 x"), ("b, more", "1.700 x"), ("z", "1.800 x")]
    assert values == [("a", "1.000 x"), *ordered, ("c", "1.000 x")]
    assert recorded_setting(page) == "machine"


def test_write_replaces_the_last_table_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")

    write(page, "table 1", "note 1")
    write(page, "table 2", "note 2")

    assert page.read_text() == f"before\n{BEGIN}\n\nnote 2\n\ntable 2\n\n{END}\nafter\n"


def test_write_rejects_a_page_without_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no place here")

    with pytest.raises(ValueError, match="has no place for the table"):
        write(page, "table", "note")
    assert page.read_text() == "no place here"


def test_a_worker_that_fails_is_an_error_with_what_it_printed():
    with pytest.raises(RuntimeError, match=r"(?s)exit codes.*no_such_function"):
        run_workers("timing:no_such_function", 1)


def test_a_launcher_outlives_its_workers_from_the_last_ones_end():
    code = """
import pathlib, sys, time
for rank, ago_s in enumerate(AGO):
    pathlib.Path(sys.argv[1], str(rank)).write_text(str(time.monotonic() - ago_s))
time.sleep(0.1)
"""
    seconds = _outlives_s([sys.executable, "-c", code.replace("AGO", "[100, 0]")])()

    assert 0.1 <= seconds < 100
    with pytest.raises(RuntimeError, match="1 workers ran, not 2"):
        _outlives_s([sys.executable, "-c", code.replace("AGO", "[0]")])()
