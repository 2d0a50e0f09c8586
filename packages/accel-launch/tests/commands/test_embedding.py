from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_launch.commands import embedding
from accel_launch.commands.launch import launch_command_parser
from accel_launch.errors import LaunchError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    return tmp_path


def test_a_port_is_in_use_while_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert embedding.is_port_in_use(port)

    assert not embedding.is_port_in_use(port)


def test_the_port_asked_about_by_default_is_torchs() -> None:
    free = not embedding.is_port_in_use()
    if free:  # somebody else's run may have it
        with socket.create_server(("127.0.0.1", 29500)):
            assert embedding.is_port_in_use()


def test_the_command_and_environment_of_one_process() -> None:
    flags = ["--cpu", "--mixed_precision", "bf16", "script.py", "--lr", "1"]
    command, environ = embedding.prepare_simple_launcher_cmd_env(launch_command_parser().parse_args(flags))

    assert command == [sys.executable, "script.py", "--lr", "1"]
    assert (environ["ACCELERATE_MIXED_PRECISION"], environ["ACCELERATE_USE_CPU"]) == ("bf16", "true")
    assert environ["PATH"] == os.environ["PATH"]


def test_the_environment_of_torchrun() -> None:
    flags = ["--cpu", "--num_processes", "2", "--mixed_precision", "fp16", "script.py"]
    environ = embedding.prepare_multi_gpu_env(launch_command_parser().parse_args(flags))

    assert (environ["ACCELERATE_NUM_PROCESSES"], environ["ACCELERATE_MIXED_PRECISION"]) == ("2", "fp16")
    assert "RANK" not in environ


@pytest.mark.parametrize(
    ("flags", "starts"),
    [
        (["--num_processes", "1"], [sys.executable, "script.py"]),
        (["--num_processes", "2"], [sys.executable, "-m", "torch.distributed.run", "--nnodes=1"]),
        (["--deepspeed_hostfile", "hosts"], ["deepspeed", "--no_local_rank", "--hostfile=hosts"]),
    ],
)
def test_what_starts_deepspeed(folder: Path, flags: list[str], starts: list[str]) -> None:
    (folder / "hosts").write_text("n0 slots=2\nn1 slots=2\n")
    flags = ["--cpu", "--use_deepspeed", *flags, "--zero_stage", "3", "script.py", "--lr", "1"]
    command, environ = embedding.prepare_deepspeed_cmd_env(launch_command_parser().parse_args(flags))

    assert command[: len(starts)] == starts
    assert command[-3:] == ["script.py", "--lr", "1"]
    assert environ["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert environ["PATH"] == os.environ["PATH"]


def test_deepspeed_has_to_be_requested() -> None:
    with pytest.raises(LaunchError, match="Give --use_deepspeed"):
        embedding.prepare_deepspeed_cmd_env(launch_command_parser().parse_args(["--cpu", "script.py"]))


def test_a_script_is_needed() -> None:
    with pytest.raises(LaunchError, match="No script was passed"):
        embedding.prepare_simple_launcher_cmd_env(launch_command_parser().parse_args([]))


def join() -> int:
    from accel_state.process.state import PartialState

    embedding.test_launch()
    return int(PartialState().num_processes)


def test_a_launched_function_joins_its_run(world: Any) -> None:
    assert world.run(join, size=2) == [2, 2]
