from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_launch.launchers.tpu.variables import prepare_tpu

Start = Callable[..., Any]
POD = ("--tpu", "--tpu_cluster", "--tpu_name", "pod", "--tpu_zone", "zone")


def last_line(run: Any) -> list[str]:
    code, out, error = run.finish()
    assert (code, error) == (0, "")
    return shlex.split(out.splitlines()[-1])


def test_a_launcher_is_started_on_each_machine(start: Start, tmp_path: Path) -> None:
    flags = (*POD, "--mixed_precision", "bf16", "--env", "A=it's b", "--dry_run")
    (tmp_path / "script.py").touch()
    run = start("launch", *flags, "script.py", "--name", "x y")
    command = last_line(run)

    assert command[:-1] == [
        *("gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod"),
        *("--zone=zone", "--worker=all"),
    ]
    there = command[-1].removeprefix("--command=").split("; ")
    assert [shlex.split(part)[1] for part in there[:-1]] == [
        "A=it's b",
        "XLA_USE_BF16=1",
        "ACCELERATE_DOWNCAST_BF16=false",
        "ACCELERATE_IN_TPU_POD=true",
    ]
    assert shlex.split(there[-1]) == [
        *("accel", "launch", "--tpu", "--no_tpu_cluster", "--mixed_precision=bf16"),
        *("script.py", "--name", "x y"),
    ]


def test_the_config_file_names_the_pod_and_its_settings_go_along(start: Start, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "distributed_type: XLA\ntpu_use_cluster: true\ntpu_use_sudo: true\ntpu_name: pod\ntpu_zone: zone\n"
        "debug: true\n"
    )
    command = last_line(start("launch", "--config_file", "c.yaml", "--dry_run", script="pass\n"))

    assert "ssh pod --zone=zone" in " ".join(command)
    assert command[-1].endswith("sudo -E accel launch --tpu --no_tpu_cluster --debug=true script.py")


def test_who_leaves_the_pod_out_stays_here(start: Start, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "distributed_type: XLA\ntpu_use_cluster: true\ntpu_name: pod\ntpu_zone: zone\n"
    )
    flags = ("--config_file", "c.yaml", "--cpu", "--num_processes", "1", "--dry_run")
    code, out, error = start("launch", *flags, script="pass\n").finish()

    assert code == 0, error
    assert "gcloud" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tpu", "--tpu_cluster"), "missing: --tpu_name, --tpu_zone"),
        ((*POD, "--env", "A"), "--env 'A' is not allowed; allowed: NAME=VALUE"),
    ],
)
def test_what_is_missing_is_named(start: Start, flags: tuple[str, ...], message: str) -> None:
    code, _, error = start("launch", *flags, "--dry_run", script="pass\n").finish()

    assert code == 2
    assert message in error


def test_variables_of_one_host_go_into_its_environment() -> None:
    args = argparse.Namespace(mixed_precision="bf16", downcast_bf16=True, debug=True, env=None)
    same, environ = prepare_tpu(args, {"A": "b"})

    assert same.env is None
    assert environ == {
        "A": "b",
        "XLA_DOWNCAST_BF16": "1",
        "ACCELERATE_DOWNCAST_BF16": "true",
        "PT_XLA_DEBUG": "1",
    }


def test_variables_of_a_pod_go_to_its_machines() -> None:
    args = argparse.Namespace(mixed_precision="no", env=["B=c"])
    found, environ = prepare_tpu(args, {"A": "b"}, pod=True)

    assert environ == {"A": "b"}
    assert found.env == ["B=c", "ACCELERATE_IN_TPU_POD=true"]
    assert args.env == ["B=c"]
