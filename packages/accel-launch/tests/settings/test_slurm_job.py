"""What Slurm's environment says; a real Slurm is in tests-integration/test_slurm.py."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.errors import LaunchError
from accel_launch.plan.launcher_table import LAUNCHERS
from accel_launch.plan.machine import Machine
from accel_launch.plan.make import make_plan
from accel_launch.plan.plan import LauncherCommand, LaunchPlan
from accel_launch.settings.resolve import resolve
from accel_launch.settings.slurm_job import find_step, first_host

BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[03-04]"}
# The second of three tasks on the second of two machines.
TASKS = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "1,3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_CPUS_ON_NODE": "6",
}
MACHINE = {**TASKS, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
MACHINE["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    script = tmp_path / "script.py"
    script.touch()

    def make(environ: dict[str, str], *flags: str) -> LaunchPlan:
        args = launch_command_parser().parse_args([*flags, str(script)])
        return make_plan(resolve(args, None, environ), str(script), [], environ, Machine(gpus=0, cores=6))

    return make


def prepared(plan: LaunchPlan, environ: dict[str, str]) -> LauncherCommand:
    found: LauncherCommand = LAUNCHERS[plan.launcher].load("prepare")(plan, environ)
    return found


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node[003-007,9],login1", "node003"),
        ("rack1-[2,4]-ib,x", "rack1-2-ib"),
        ("a,b[1-2]", "a"),
        ("127.0.0.[1-2]", "127.0.0.1"),
    ],
)
def test_the_first_machine_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_runs_that_may_share_a_machine_have_ports_of_their_own() -> None:
    places = [
        find_step({**TASKS, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step})
        for job, step in (("7", "0"), ("7", "1"), ("9", "0"), ("20007", "0"))
    ]

    assert [place.port for place in places if place] == [10007, 10008, 10009, 10007]


def test_a_task_is_a_worker(plan: Any) -> None:
    made = plan(TASKS)
    environ = prepared(made, TASKS).environ

    assert made.launcher == "task"
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    assert [environ[name] for name in names] == ["2", "4", "1", "3", "1", "node03", "10007"]
    assert environ["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("environ", [TASKS, MACHINE, BATCH], ids=["tasks", "machine", "batch"])
def test_a_jobs_facts_are_read_once(plan: Any, environ: dict[str, str]) -> None:
    counted = mock.Mock(wraps=find_step)
    with mock.patch("accel_launch.settings.slurm_job.find_step", counted):
        prepared(plan(environ), environ)
    assert counted.call_count == 1


def test_a_task_per_machine_starts_its_machines_workers(plan: Any) -> None:
    made = plan(MACHINE)
    command = prepared(made, MACHINE).command

    assert made.launcher == "torchrun"
    assert {"--nnodes=2", "--node_rank=1", "--master_addr=node03", "--master_port=10007"} <= set(command)
    assert made.settings["machine_rank"].detail == "SLURM_NODEID"


def test_a_batch_script_starts_a_launcher_on_each_machine(plan: Any) -> None:
    made = plan(BATCH, "--cpu", "--mixed_precision", "bf16")
    command = shlex.join(prepared(made, BATCH).command)

    assert made.launcher == "srun"
    assert command.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 ")
    assert "-m accel_launch launch --cpu=true --mixed_precision=bf16 " in command


def test_outside_of_a_job_srun_requests_machines(plan: Any) -> None:
    made = plan({}, "--launcher", "srun", "--num_machines", "3")

    assert prepared(made, {}).command[:2] == ["srun", "--nodes=3"]
    assert "--launcher=srun" not in prepared(made, {}).command


@pytest.mark.parametrize(
    ("environ", "flags", "how"),
    [
        ({**TASKS, "SLURM_STEP_NUM_TASKS": "1"}, (), "exec"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, (), "exec"),
        ({**BATCH, "SLURM_STEP_ID": "4294967291"}, (), "srun"),  # Slurm's number for the batch script
        ({**TASKS, "LOCAL_RANK": "0"}, (), "exec"),  # inside of a worker
        (TASKS, ("--num_processes", "1"), "exec"),
        (TASKS, ("--num_processes", "4"), "task"),
        (TASKS, ("--launcher", "local", "--num_processes", "2"), "local"),
        (BATCH, ("--num_machines", "1", "--num_processes", "2"), "local"),
        (BATCH, ("--num_processes", "1"), "exec"),
        (BATCH, ("--num_processes", "1", "--num_machines", "1"), "exec"),
        (BATCH, ("--num_processes", "2"), "srun"),
        (BATCH, ("--machine_rank", "0"), "torchrun"),
        (BATCH, ("--machine_rank", "1", "--launcher", "torchrun"), "torchrun"),
        (BATCH, ("--machine_rank", "0", "--launcher", "srun"), "srun"),
        (BATCH, ("--launcher", "mpirun", "--num_machines", "1"), "mpirun"),
        (MACHINE, ("--num_processes", "1"), "exec"),
        (MACHINE, ("--launcher", "torchrun"), "torchrun"),
    ],
)
def test_what_is_started_where(plan: Any, environ: dict[str, str], flags: tuple[str, ...], how: str) -> None:
    assert plan(environ, *flags).launcher == how


def test_a_machine_rank_in_a_batch_script_starts_that_machine_alone(plan: Any) -> None:
    made = plan(BATCH, "--machine_rank", "1")

    assert {"--nnodes=2", "--node_rank=1", "--master_addr=node03"} <= set(prepared(made, BATCH).command)
    # The port of a machine that does not see the job.
    assert made.settings["main_process_port"] == plan({}).settings["main_process_port"]


def test_a_hostfile_in_a_batch_script_is_followed(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")

    made = plan(BATCH, "--mpirun_hostfile", str(tmp_path / "hosts"), "--num_processes", "2")

    assert made.launcher == "mpirun"


def test_without_srun_the_ways_out_are_named(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = prepared(plan(BATCH), BATCH)

    with pytest.raises(LaunchError) as error:
        found.wait()

    for text in ("num_machines=2 from SLURM_JOB_NUM_NODES", "--num_machines 1", "--machine_rank 0 to 1"):
        assert text in str(error.value)


def test_flags_and_variables_of_the_user_come_first(plan: Any) -> None:
    made = plan({**MACHINE, "MASTER_ADDR": "other"}, "--main_process_port", "5")

    assert (made.settings.value("main_process_ip"), made.settings.value("main_process_port")) == ("other", 5)


@pytest.mark.parametrize(
    ("environ", "flags", "message"),
    [
        (TASKS, ("--num_processes", "2"), "--num_processes 2, but srun started 4 tasks on 2 machine"),
        ({**TASKS, "SLURM_PROCID": "x"}, (), "SLURM_PROCID=x is not the number"),
        ({**TASKS, "SLURM_NODEID": ""}, (), r"SLURM_NODEID=\(not set\)"),
        ({**TASKS, "SLURM_STEP_TASKS_PER_NODE": "two"}, (), "SLURM_STEP_TASKS_PER_NODE=two"),
        ({**BATCH, "SLURM_JOB_NODELIST": ""}, (), "Give --main_process_ip"),
        (
            BATCH,
            ("--num_processes", "3"),
            r"num_processes=3 \(from --num_processes\) over num_machines=2 \(from SLURM_JOB_NUM_NODES\)",
        ),
        (
            BATCH,
            ("--num_processes", "1", "--num_machines", "2"),
            r"over num_machines=2 \(from --num_machines\)",
        ),
        (MACHINE, ("--num_processes", "3"), r"over num_machines=2 \(from SLURM_STEP_NUM_NODES\)"),
        (MACHINE, ("--machine_rank", "2"), r"but num_machines=2 \(from SLURM_STEP_NUM_NODES\)"),
    ],
)
def test_what_does_not_fit_is_rejected(
    plan: Any, environ: dict[str, str], flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        plan(environ, *flags)


def test_an_address_that_is_given_is_not_looked_for_in_slurms_list(plan: Any) -> None:
    environ = {**BATCH, "SLURM_JOB_NODELIST": ""}

    assert plan(environ, "--main_process_ip", "a").settings.value("main_process_ip") == "a"


def test_outside_of_slurm_there_is_no_step() -> None:
    assert find_step({}) is None
