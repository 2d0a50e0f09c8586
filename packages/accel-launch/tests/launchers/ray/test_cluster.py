"""What is said without a Ray cluster; tests-integration/test_ray.py has one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from accel_launch import launch_command, launch_command_parser
from accel_launch.errors import NotAvailableError

Start = Callable[..., Any]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    args = launch_command_parser().parse_args(["--launcher", "ray", __file__])

    with pytest.raises(NotAvailableError, match=r"'\./packages/accel-launch\[ray\]'"):
        launch_command(args)


@pytest.mark.parametrize(
    ("flags", "note", "size"),
    [((), "one process per GPU of the cluster", None), (("--num_processes", "3"), "3 processes", "3")],
)
def test_a_dry_run_needs_no_cluster(
    start: Start, flags: tuple[str, ...], note: str, size: str | None
) -> None:
    code, out, _ = start("launch", "--launcher", "ray", *flags, "--dry_run", script="pass\n").finish()
    lines = out.splitlines()

    assert code == 0
    assert lines[0].startswith(f"# {note}, placed by Ray")
    assert [line for line in lines if "WORLD_SIZE" in line] == ([f"export WORLD_SIZE={size}"] if size else [])
    assert lines[-1] == f"{sys.executable} script.py"
