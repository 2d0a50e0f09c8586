"""The page on migrating: its commands run as they stand there, its numbers are counted, its tests exist."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import runpy
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from accel_launch.cli import main
from check_interface import REFERENCE, check, read_list
from repo_checks.documented import api_entries, client_entries

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/migrate.md").read_text()
SCRIPT = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
BLOCKS = re.findall(r"```sh\n(.*?)```\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_every_block_of_commands_is_run() -> None:
    assert len(BLOCKS) == PAGE.count("```sh\n") == 3
    assert PAGE.count("```python") == 1


@pytest.mark.parametrize(("commands", "lines"), BLOCKS, ids=lambda text: text.split("\n")[0][:40])
def test_commands_of_the_page(tmp_path: Path, commands: str, lines: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-ec", commands],
        cwd=tmp_path,
        env=os.environ | {"HF_HOME": str(tmp_path / "hf"), "PATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert run.returncode == 0, run.stderr
    # The page shows only the beginning of an error.
    printed = run.stdout.splitlines()
    for line, shown in zip(printed, lines.splitlines(), strict=True):
        assert line.startswith(shown)


def section(title: str) -> str:
    """The text under a heading of the page, up to the next one of its level."""
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of all tables in a text, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {number - 1 for number, line in enumerate(lines) if set(line) <= set("|- ")}
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for number, line in enumerate(lines)
        if number not in heads and number - 1 not in heads
    ]


@functools.cache
def collected_from(file: str) -> set[str]:
    """The names of the tests that pytest collects from a file of the repository."""
    assert Path(file).name.startswith("test_")
    return {
        node.name
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


BETTER, DIFFERENCES = rows(section("What is better")), rows(section("What differs, and why"))


def test_the_tables_are_read_in_full():
    assert len(BETTER) >= 12
    assert len(DIFFERENCES) >= 40
    assert {len(row) for row in BETTER} == {3}
    assert {len(row) for row in DIFFERENCES} == {4}
    assert len(rows(section("What is the same"))) == 9


@pytest.mark.parametrize("row", BETTER + DIFFERENCES, ids=lambda row: row[0][:40])
def test_each_difference_has_a_test(row: list[str]):
    named = re.findall(r"`([^`]+)::([^`]+)`", row[-1])

    assert named, "no test is named"
    assert all(row[:-1]), "a cell is empty"
    for file, test in named:
        assert test in collected_from(file), f"{file} has no {test}"


def names_of(file: str) -> dict[str, Any]:
    """The names of another test file, which states what is documented."""
    return runpy.run_path(str(ROOT / file))


def words_of(name: str) -> list[str]:
    return (ROOT / "packages/accel-launch/tests/settings/schema" / name).read_text().split()


def test_the_numbers_of_what_is_the_same_are_counted():
    api = json.loads((REFERENCE / "api.json").read_text())
    libraries = names_of("tests-integration/test_clients.py")
    clients = list(client_entries(libraries["CLIENTS"]))
    variables = names_of("packages/accel-state/tests/env/test_table.py")["documented_names"]
    entries = [*api_entries(api), *clients]
    problems, missing = check(entries, read_list(REFERENCE / "missing.txt"))
    assert (problems, missing) == ([], set())
    numbers = [
        len({entry.name for entry in entries}),
        len(clients),
        len(libraries["listed"]("members used") - libraries["FOREIGN"]),
        len(libraries["listed"]("keyword arguments")),
        len(list(variables())),
        len(words_of("documented_flags.txt")),
        len(words_of("documented_keys.txt")),
        8,
    ]

    assert [row[1] for row in rows(section("What is the same"))] == [
        *(f"{number} of {number}" for number in numbers),
        "all",
    ]


def test_the_commands_are_there(capsys: pytest.CaptureFixture[str]):
    names = ["config", "launch", "env", "test", "estimate-memory", "merge-weights", "tpu-config", "to-fsdp2"]
    text = next(row[0] for row in rows(section("What is the same")) if row[0].startswith("commands"))
    assert re.findall(r"`([^`]+)`", text) == names
    for name in names:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"usage: accel {name}" in capsys.readouterr().out
