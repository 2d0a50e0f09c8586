"""The help of all commands of accel, those of its other packages too."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import pytest

from accel.__about__ import __version__
from accel_launch import cli

COMMANDS = [
    *("launch", "config", "env", "to-fsdp2", "tpu-config"),
    *sorted(point.name for point in entry_points(group="accel.commands")),
]


def help_of(command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    text: str = capsys.readouterr().out
    return text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_are_commands_that_are_understood(command, monkeypatch, capsys) -> None:
    _, _, examples = help_of(command, 80, monkeypatch, capsys).partition("\nexamples:\n")
    parsed = []

    def parse(parser: argparse.ArgumentParser, tokens: Sequence[str]) -> int:
        parsed.append(parser.parse_args(tokens))
        return 0

    monkeypatch.setattr(cli, "_call", parse)
    for line in examples.splitlines():
        program, *tokens = shlex.split(line)
        assert (program, tokens[0]) == ("accel", command)
        assert cli.main(tokens) == 0
    assert parsed


@pytest.mark.parametrize("command", COMMANDS)
def test_a_narrow_help_cuts_no_word(command, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_HOME", "/a/folder/with/a/name/that/is/longer/than/a/line/of/the/help/can/be")
    whole = help_of(command, 1000, monkeypatch, capsys).split()

    assert set(help_of(command, 60, monkeypatch, capsys).split()) <= set(whole)


def test_python_m_accel_is_accel(tmp_path) -> None:
    command = [sys.executable, "-m", "accel"]
    ran = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr, ran.returncode) == (f"accel {__version__}\n", "", 0)
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    launch = ["launch", "--cpu", "--num_processes", "2", str(tmp_path / "fails.py")]
    ran = subprocess.run([*command, *launch], capture_output=True, timeout=60)
    assert ran.returncode == 3
