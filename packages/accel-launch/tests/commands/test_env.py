from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

from accel_launch.commands.env import env_parser, environment_report


def run(arguments: list[str]) -> int:
    args = env_parser().parse_args(arguments)
    return int(args.func(args) or 0)


def test_the_report_has_what_a_bug_report_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    report = environment_report()

    assert platform.python_version() in report["Python"]
    assert "torch" in report["Packages"]
    assert report["CPU cores"] == len(os.sched_getaffinity(0))
    assert report["torch"]["CUDA available"] is False
    assert "gloo" in report["torch"]["Backends"]
    assert report["Variables"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert report["Config file"] == "none"


def test_text_and_json_show_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("num_processes: 2\n")

    assert run(["--config_file", str(path)]) == 0
    assert "  - num_processes: 2" in capsys.readouterr().out.splitlines()
    assert run(["--config_file", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["Config"] == {"num_processes": 2}


def test_a_broken_config_is_part_of_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("num_proceses: 2\n")

    assert run(["--config_file", str(path)]) == 0
    out = capsys.readouterr().out
    assert "unknown key 'num_proceses'. Did you mean num_processes?" in out
    assert "- Python: " in out
