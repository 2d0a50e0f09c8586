from __future__ import annotations

from pathlib import Path

import pytest

from accel_launch.config import load_config_from_file, write_basic_config
from accel_launch.config.write import basic_values
from accel_launch.errors import ConfigError
from accel_launch.plan.machine import Machine


def test_it_writes_what_loads(tmp_path: Path) -> None:
    path = write_basic_config("bf16", tmp_path / "a" / "config.yaml")

    config = load_config_from_file(str(path))
    assert config.mixed_precision == "bf16"
    assert config.num_machines == 1
    assert config.use_cpu is False


def test_a_file_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("num_processes: 7\n")

    assert write_basic_config(save_location=str(path)) is False
    assert path.read_text() == "num_processes: 7\n"
    assert str(path) in capsys.readouterr().out


def test_an_unknown_precision_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fp17"):
        write_basic_config("fp17", tmp_path / "config.yaml")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("gpus", "kind", "processes"), [(0, "NO", 1), (1, "NO", 1), (4, "MULTI_GPU", 4)])
def test_it_fits_the_machine(gpus: int, kind: str, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    values = basic_values("no", Machine(gpus=gpus, cores=4))

    assert (values["distributed_type"], values["num_processes"]) == (kind, processes)
