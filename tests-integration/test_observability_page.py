"""The page on observability: its programs run as they stand there, and its tables are true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from accel.trackers.base import GeneralTracker
from accel.trackers.registry import TRACKERS, tracker_class

PAGE = (Path(__file__).parents[1] / "docs" / "observability.md").read_text()
BLOCKS = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.usefixtures("fresh_state")
def test_the_programs_print_and_write_what_the_page_shows(tmp_path, monkeypatch, capsys):
    from accel.trackers import registry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_REGISTERED", {})
    names = {"__name__": "page"}
    for kind, text in BLOCKS:
        if kind == "python":
            exec(compile(text, "observability.md", "exec"), names)
        elif text.startswith("{"):
            shown = [json.loads(line) for line in text.splitlines()]
            written = [json.loads(line) for line in Path("runs/digits.jsonl").read_text().splitlines()]
            assert [line | {"time": 0} for line in written] == [line | {"time": 0} for line in shown]
        else:
            assert capsys.readouterr().out == text

    assert [kind for kind, _ in BLOCKS] == ["python", "text", "python", "text", "python", "text"]


def test_the_table_lists_every_tracker_with_what_it_has():
    rows = re.findall(r'^\| `"(\w+)"` \|.*\| (yes|) *\| (yes|) *\|$', PAGE, flags=re.MULTILINE)

    assert sorted(name for name, _, _ in rows) == sorted(TRACKERS)
    for name, has_images, has_tables in rows:
        kind = tracker_class(name)
        assert (kind.log_images is not GeneralTracker.log_images) == bool(has_images)
        assert (kind.log_table is not GeneralTracker.log_table) == bool(has_tables)
