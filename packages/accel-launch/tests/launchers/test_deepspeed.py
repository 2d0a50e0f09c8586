from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.errors import LaunchError
from accel_launch.plan.launcher_table import LAUNCHERS
from accel_launch.plan.machine import Machine
from accel_launch.plan.make import make_plan
from accel_launch.plan.plan import LaunchPlan
from accel_launch.settings.resolve import resolve


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def make(*flags: str, hosts: str = "n0 slots=4\nn1 slots=2  # smaller\n") -> LaunchPlan:
        (tmp_path / "hosts").write_text(hosts)
        args = launch_command_parser().parse_args(["--use_deepspeed", *flags, "train.py", "--lr", "1"])
        return make_plan(resolve(args, None, {}), "train.py", ["--lr", "1"], {}, Machine(gpus=0, cores=4))

    return make


def command(plan: LaunchPlan) -> list[str]:
    found: list[str] = list(LAUNCHERS[plan.launcher].load("prepare")(plan, {}).command)
    return found


HOSTS = ("--deepspeed_hostfile", "hosts")


def test_pdsh_reaches_the_machines_of_a_hostfile(plan: Any) -> None:
    made = plan(*HOSTS, "--num_machines", "2", "--num_processes", "4", "--zero_stage", "3")

    assert made.launcher == "deepspeed"
    assert shlex.join(command(made)[:7]) == (
        "deepspeed --no_local_rank --hostfile=hosts --num_nodes=2 --num_gpus=2 --master_port=29500 "
        "--launcher=pdsh"
    )
    # Other machines do not have this environment, so it stands in the command.
    assert command(made)[7:9] == ["--no_python", "env"]
    assert {"ACCELERATE_USE_DEEPSPEED=true", "ACCELERATE_DEEPSPEED_ZERO_STAGE=3"} <= set(command(made))
    assert command(made)[-3:] == ["train.py", "--lr", "1"]


@pytest.mark.parametrize("launcher", ["openmpi", "mvapich", "mpich", "impi", "slurm"])
def test_other_launchers_are_named(plan: Any, launcher: str) -> None:
    made = plan(*HOSTS, "--deepspeed_multinode_launcher", launcher)

    assert f"--launcher={launcher}" in command(made)
    assert "--num_nodes=2" in command(made)


def test_without_ssh_each_machine_has_its_command(plan: Any) -> None:
    where = ("--machine_rank", "1", "--num_machines", "2", "--main_process_ip", "n0")
    found = command(plan(*HOSTS, *where, "--deepspeed_multinode_launcher", "nossh"))

    assert {"--no_ssh", "--node_rank=1", "--master_addr=n0"} <= set(found)
    assert found[-3:] == ["train.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("flags", "how"),
    [
        (("--num_processes", "2"), "local"),
        ((), "exec"),
        ((*HOSTS, "--deepspeed_multinode_launcher", "standard", "--num_processes", "2"), "local"),
        (
            ("--num_machines", "2", "--main_process_ip", "n0", "--deepspeed_multinode_launcher", "standard"),
            "torchrun",
        ),
        (("--num_machines", "2", "--main_process_ip", "n0"), "torchrun"),
    ],
)
def test_elsewhere_workers_are_started_like_any_others(plan: Any, flags: tuple[str, ...], how: str) -> None:
    made = plan(*flags)

    assert made.launcher == how
    assert made.environ["ACCELERATE_USE_DEEPSPEED"] == "true"


def test_filters_choose_machines_and_slots(plan: Any) -> None:
    found = command(plan(*HOSTS, "--deepspeed_inclusion_filter", "n0:0,3@n1"))

    assert "--include=n0:0,3@n1" in found
    assert not any(word.startswith("--num_") for word in found)


@pytest.mark.parametrize(
    ("flags", "hosts", "message"),
    [
        (("--deepspeed_inclusion_filter", "n00"), "n0 slots=4\n", "names 'n00', .* Did you mean n0?"),
        (("--deepspeed_exclusion_filter", "n0:4"), "n0 slots=4\n", "slot '4' of n0, which has 0 to 3"),
        (
            ("--deepspeed_exclusion_filter", "n0", "--deepspeed_inclusion_filter", "n0"),
            "n0 slots=4\n",
            "exclude each other",
        ),
        ((), "n0 slot=4\n", "line 1: 'slot=4' is not understood. Did you mean slots?"),
        ((), "n0\n", "gives n0 no slots"),
        ((), "n0 slots=1\nn0 slots=1\n", "names n0 twice"),
        (("--num_machines", "2"), "n0 slots=1\n", "num_machines=2, but the hostfile has 1"),
        (("--num_processes", "6"), "n0 slots=4\nn1 slots=2\n", "is 3 each, but n1 has 2 slots"),
    ],
)
def test_typos_are_named(plan: Any, flags: tuple[str, ...], hosts: str, message: str) -> None:
    made = plan(*HOSTS, *flags, hosts=hosts)
    with pytest.raises(LaunchError, match=message):
        command(made)


def test_a_launcher_without_a_hostfile_is_rejected(plan: Any) -> None:
    made = plan("--num_machines", "2", "--deepspeed_multinode_launcher", "pdsh")
    with pytest.raises(LaunchError, match="pdsh needs a hostfile: give --deepspeed_hostfile"):
        command(made)
