from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.errors import LaunchError
from accel_launch.launchers.mpi import mpirun_environment
from accel_launch.plan.machine import Machine
from accel_launch.plan.make import make_plan
from accel_launch.settings.resolve import resolve

Start = Callable[..., Any]
# Open MPI refuses to run as root unless told twice, and containers have no other user.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun here")

SCRIPT = """
import torch
from accel_state.process.state import PartialState

state = PartialState(cpu=True)
total = torch.tensor([state.process_index + 1])
torch.distributed.all_reduce(total)
place = f"{state.num_processes} {state.local_process_index}"
open(f"done{state.process_index}", "w").write(f"{total.item()} {place}")
torch.distributed.destroy_process_group()
"""


def plan(tmp_path: Path, *flags: str) -> Any:
    (tmp_path / "script.py").touch()
    script = str(tmp_path / "script.py")
    settings = resolve(launch_command_parser().parse_args([*flags, script]), None, {})
    return make_plan(settings, script, [], {}, Machine(gpus=0, cores=8))


def test_the_first_machine_is_where_rank_0_listens(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n0 slots=2\nn1 slots=2\n")
    made = plan(tmp_path, "--mpirun_hostfile", str(tmp_path / "hosts"), "--num_processes", "4")
    environ = mpirun_environment(made, 29500)

    assert (made.launcher, made.processes) == ("mpirun", 2)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("n0", "29500")
    assert (environ["OMP_NUM_THREADS"], environ["CCL_WORKER_COUNT"]) == ("4", "1")


def test_a_file_of_several_machines_needs_no_address(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n0\nn1\n")
    flags = ("--num_machines", "2", "--num_processes", "2", "--mpirun_hostfile", str(tmp_path / "hosts"))

    assert plan(tmp_path, *flags).launcher == "mpirun"
    assert plan(tmp_path, "--num_machines", "1:2", *flags[2:]).launcher == "mpirun"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mpirun_hostfile", "none"), "There is no hostfile 'none'"),
        (("--launcher", "mpirun", "--max_restarts", "1"), "mpirun does not support max_restarts=1"),
    ],
)
def test_what_mpirun_cannot_do_is_rejected(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        plan(tmp_path, *flags)


def test_a_missing_mpirun_is_named(start: Start) -> None:
    run = start("launch", "--launcher", "mpirun", script="pass\n", env={"PATH": "/nowhere"})
    code, _, error = run.finish()

    assert (code, error.splitlines()) == (
        2,
        ["accel launch: error: There is no mpirun on the PATH. Install Open MPI, MPICH or Intel MPI."],
    )


@pytest.mark.long
@needs_mpirun
@pytest.mark.parametrize("how", ["--launcher", "--mpirun_hostfile"])
def test_accel_starts_mpirun_for_real(start: Start, tmp_path: Path, how: str) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    word = {"--launcher": "mpirun", "--mpirun_hostfile": "hosts"}[how]
    run = start("launch", "--cpu", "--num_processes", "2", how, word, script=SCRIPT, env=AS_ROOT)
    code, _, error = run.finish(90)

    assert code == 0, error
    assert (run.folder / "done0").read_text() == "3 2 0"
    assert (run.folder / "done1").read_text() == "3 2 1"
    run.assert_nothing_left()


@needs_mpirun
def test_a_hostfile_with_too_few_slots_starts_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    flags = ("--num_processes", "3", "--mpirun_hostfile", "hosts")
    code, _, error = start("launch", *flags, script="pass\n", env=AS_ROOT).finish()

    assert code == 2
    assert "num_processes=3, but the hostfile hosts has 2 slots on 1 machines. Give --num_pro" in error


@needs_mpirun
def test_a_dry_run_shows_mpiruns_command(start: Start) -> None:
    run = start("launch", "--dry_run", "--num_processes", "2", "--launcher", "mpirun", script="pass\n")
    command = run.finish()[1].splitlines()[-1]

    assert "mpirun -n 2 --oversubscribe" in command
    assert "-x MASTER_ADDR -x MASTER_PORT" in command


@needs_mpirun
def test_a_script_that_mpirun_started_itself(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        free_port = free.getsockname()[1]
    (tmp_path / "script.py").write_text(SCRIPT)
    master = ("-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port}")
    command = ["mpirun", "--oversubscribe", "-n", "2", *master, sys.executable, "script.py"]
    environ = {**os.environ, **AS_ROOT}
    run = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)

    assert run.returncode == 0, run.stderr
    assert (tmp_path / "done1").read_text() == "3 2 1"
