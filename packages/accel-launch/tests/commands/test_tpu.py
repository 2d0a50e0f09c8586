from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]
POD = ("--tpu_name", "pod", "--tpu-zone", "zone")


@pytest.mark.parametrize("dry", ["--debug", "--dry_run"])
def test_the_gcloud_command_is_printed_and_not_run(start: Start, dry: str) -> None:
    run = start("tpu-config", *POD, dry, "--command", "pip install x", "--command", "echo", "done")
    code, out, _ = run.finish()

    assert code == 0
    assert shlex.split(out) == [
        *("gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod", "--zone=zone", "--worker=all"),
        "--command=pip install x; echo done",
    ]


def test_the_config_file_has_the_pod_and_the_commands(start: Start, tmp_path: Path) -> None:
    (tmp_path / "setup.txt").write_text("cd work\n\ngit pull\n")
    (tmp_path / "c.yaml").write_text(
        "tpu_name: pod\ntpu_zone: zone\ncommand_file: setup.txt\ncommands: [ls]\n"
    )
    run = start("tpu-config", "--debug", "--config_file", "c.yaml")

    assert shlex.split(run.finish()[1])[-1] == "--command=cd work; git pull; ls"
    other = start("tpu-config", "--debug", "--config_file", "c.yaml", "--command", "pwd")
    assert shlex.split(other.finish()[1])[-1] == "--command=pwd"


def test_gcloud_is_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "gcloud").write_text('#!/bin/sh\necho ran "$7"\nexit 3\n')
    (tmp_path / "gcloud").chmod(0o755)
    run = start("tpu-config", *POD, "--command", "ls", env={"PATH": f"{tmp_path}:/bin:/usr/bin"})
    code, out, _ = run.finish()

    assert (code, out.splitlines()[-1]) == (3, "ran --worker=all")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--command", "ls"), "missing: --tpu_name, --tpu_zone"),
        (POD, "There is nothing to run"),
        ((*POD, "--command_file", "none"), "There is no command file none"),
        ((*POD, "--install_accelerate"), "--command 'pip install ...'"),
    ],
)
def test_what_is_missing_is_named(start: Start, arguments: tuple[str, ...], message: str) -> None:
    code, _, error = start("tpu-config", *arguments).finish()

    assert code == 2
    assert message in error
    assert len(error.splitlines()) == 1
