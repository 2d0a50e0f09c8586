from __future__ import annotations

from pathlib import Path

import pytest

from accel_launch.commands.config import _has_tpu, config_parser
from accel_launch.config import load_config_from_file
from accel_launch.errors import LaunchError


def run(arguments: list[str]) -> int:
    args = config_parser().parse_args(arguments)
    return int(args.func(args) or 0)


def test_default_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"

    assert run(["default", "--config-file", str(path), "--mixed_precision", "fp16"]) == 0
    assert load_config_from_file(path).mixed_precision == "fp16"
    assert str(path) in capsys.readouterr().out
    assert run(["default", "--config_file", str(path)]) == 1


def test_update_leaves_no_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("use_xpu: true\n")
    with pytest.raises(LaunchError, match=r"has no effect any more: remove it"):
        run(["update", "--config_file", str(path)])
    assert path.read_text() == "use_xpu: true\n"


def test_update_rewrites_old_forms_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("fp16: true\nnum_processes: 2\n")

    assert run(["update", "--config_file", str(path)]) == 0
    assert "use mixed_precision" in capsys.readouterr().out
    assert load_config_from_file(path).to_dict() == {"mixed_precision": "fp16", "num_processes": 2}

    assert run(["update", "--config_file", str(path)]) == 0
    assert "up to date" in capsys.readouterr().out


def test_a_tpu_is_known_by_its_device_files(tmp_path: Path) -> None:
    (tmp_path / "accel").mkdir()
    (tmp_path / "accel/accel0").touch()  # an accelerator of Linux's own subsystem
    assert not _has_tpu(tmp_path)

    (tmp_path / "accel0").touch()
    assert _has_tpu(tmp_path)
