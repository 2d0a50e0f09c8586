from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.errors import LaunchError
from accel_launch.launchers.torchrun import (
    reach_machine_0,
    torchrun_command,
    torchrun_environment,
    torchrun_port,
)
from accel_launch.plan.machine import Machine
from accel_launch.plan.make import make_plan
from accel_launch.plan.plan import LaunchPlan
from accel_launch.settings.resolve import resolve

Start = Callable[..., Any]
SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
rank = dist.get_rank()
open(f"done{rank}", "w").write(f"{total.item():g} {os.environ['LOCAL_RANK']} {os.environ['GROUP_RANK']}")
dist.destroy_process_group()
"""


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    script = tmp_path / "script.py"
    script.touch()

    def make(*flags: str, environ: dict[str, str] | None = None) -> LaunchPlan:
        args = launch_command_parser().parse_args([*flags, str(script), "--lr", "1"])
        settings = resolve(args, None, {})
        return make_plan(settings, str(script), ["--lr", "1"], environ or {}, Machine(gpus=0, cores=4))

    return make


def options(command: list[str]) -> dict[str, str]:
    return dict(
        token.partition("=")[::2] for token in command[3:] if token.startswith("--") and token != "--lr"
    )


def test_static_rendezvous(plan: Any) -> None:
    command = torchrun_command(
        plan(
            *(
                "--num_machines",
                "2",
                "--machine_rank",
                "1",
                "--main_process_ip",
                "host",
                "--num_processes",
                "4",
            ),
            *("--monitor_interval", "2", "--role", "trainer", "--tee", "3"),
            *("--log_dir", "logs", "--rdzv_conf", "timeout=9"),
        ),
        29501,
        listens=False,
    )

    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[-2:] == ["--lr", "1"]
    assert options(command) == {
        "--nnodes": "2",
        "--nproc_per_node": "2",
        "--node_rank": "1",
        "--master_addr": "host",
        "--master_port": "29501",
        "--max_restarts": "0",
        "--monitor_interval": "2.0",
        "--role": "trainer",
        "--tee": "3",
        "--log_dir": "logs",
        "--rdzv_conf": "timeout=9",
    }


def test_elastic_rendezvous(plan: Any) -> None:
    elastic = plan(
        *(
            "--num_machines",
            "1:3",
            "--main_process_ip",
            "host",
            "--rdzv_backend",
            "c10d",
            "--num_processes",
            "6",
        )
    )
    found = options(torchrun_command(elastic, 29500, listens=False))

    assert (found["--nnodes"], found["--nproc_per_node"]) == ("1:3", "2")
    assert (found["--rdzv_backend"], found["--rdzv_endpoint"]) == ("c10d", "host:29500")
    assert "--master_addr" not in found
    environ = torchrun_environment(elastic)
    assert environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert environ["ACCELERATE_NUM_PROCESSES"] == "6"


def test_machines_know_their_place_in_the_network(plan: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = ("--num_machines", "2", "--num_processes", "2", "--rdzv_backend", "c10d")
    here = plan(*flags, "--main_process_ip", "127.0.0.1")
    there = plan(
        *flags, "--main_process_ip", "192.0.2.1", "--rdzv_conf", "timeout=9"
    )  # reserved for documents

    assert options(torchrun_command(here, port, listens=True))["--local_addr"] == "127.0.0.1"
    assert torchrun_environment(here)["GLOO_SOCKET_IFNAME"] == "lo"
    assert options(torchrun_command(there, port, listens=False))["--rdzv_conf"] == "timeout=9,is_host=false"
    asked = plan(*flags, "--main_process_ip", "192.0.2.1", "--rdzv_conf", "is_host=true")
    assert options(torchrun_command(asked, port, listens=False))["--rdzv_conf"] == "is_host=true"
    kept = plan(*flags, "--main_process_ip", "127.0.0.1", environ={"GLOO_SOCKET_IFNAME": "mine"})
    assert torchrun_environment(kept)["GLOO_SOCKET_IFNAME"] == "mine"


def test_logs_alone_are_kept_too(plan: Any) -> None:
    made = plan("--launcher", "torchrun", "--log_dir", "logs")

    assert options(torchrun_command(made, 1, listens=True))["--tee"] == "3"


@pytest.mark.parametrize("flag", ["--module", "--no_python"])
def test_what_the_script_is_passes_through(tmp_path: Path, flag: str) -> None:
    name = "json" if flag == "--module" else "sh"
    args = launch_command_parser().parse_args(["--launcher", "torchrun", flag, name])
    made = make_plan(resolve(args, None, {}), name, [], {"PATH": "/bin:/usr/bin"}, Machine(gpus=0, cores=1))

    assert torchrun_command(made, 1, listens=True)[-2:] == [flag, name]


def test_ports(plan: Any) -> None:
    several = plan("--num_machines", "2", "--main_process_ip", "host", "--num_processes", "2")
    port, port_socket = torchrun_port(several)  # machine 0 listens
    assert port_socket is not None
    port_socket.close()
    assert port == 29500
    other = (
        "--num_machines",
        "2",
        "--machine_rank",
        "1",
        "--main_process_ip",
        "host",
        "--num_processes",
        "2",
    )
    assert torchrun_port(plan(*other)) == (29500, None)

    port, port_socket = torchrun_port(plan("--launcher", "torchrun"))
    assert port_socket is not None
    assert port_socket.getsockname()[1] == port
    port_socket.close()

    with socket.create_server(("", 0)) as server:
        taken = plan("--launcher", "torchrun", "--main_process_port", str(server.getsockname()[1]))
        with pytest.raises(LaunchError, match="in use"):
            torchrun_port(taken)


def test_one_machine_for_real(start: Start) -> None:
    run = start("launch", "--launcher", "torchrun", "--num_processes", "2", script=SCRIPT)
    code, _, error = run.finish(90)

    assert code == 0, error
    assert (run.folder / "done0").read_text() == "2 0 0"
    assert (run.folder / "done1").read_text() == "2 1 0"


@pytest.mark.long
def test_two_machines_for_real(start: Start) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    flags = ("launch", "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1")
    runs = [
        start(*flags, "--main_process_port", port, "--machine_rank", str(rank), script=SCRIPT)
        for rank in (0, 1)
    ]
    for run in runs:
        code, _, error = run.finish(90)
        assert code == 0, error

    assert (runs[0].folder / "done0").read_text() == "2 0 0"
    assert (runs[0].folder / "done1").read_text() == "2 0 1"


@pytest.mark.long
def test_a_restart_for_real(start: Start) -> None:
    script = (
        "import os\ncount = os.environ['TORCHELASTIC_RESTART_COUNT']\nopen('run' + count, 'w').close()\n"
        "raise SystemExit(count == '0')\n"
    )
    run = start(
        "launch", "--max_restarts", "1", "--rdzv_backend", "c10d", "--num_processes", "2", script=script
    )
    code, _, error = run.finish(90)

    assert code == 0, error
    assert (run.folder / "run1").exists()


def other_machine(plan: Any, *flags: str, host: str = "127.0.0.1") -> Any:
    machines = ("--num_machines", "2", "--machine_rank", "1", "--num_processes", "2")
    return plan(*machines, "--main_process_ip", host, *flags)


def test_a_host_that_nobody_knows_is_rejected_immediately(plan: Any) -> None:
    with pytest.raises(LaunchError, match=r"main_process_ip=no-such-host\.invalid .* is not known here"):
        reach_machine_0(other_machine(plan, host="no-such-host.invalid"), 29500, listens=False)


def test_an_unreachable_machine_0_is_named_after_the_timeout(plan: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(LaunchError) as error:
            reach_machine_0(other_machine(plan, "--rdzv_conf", "timeout=0.5"), port, listens=False)

    assert f"could not be reached at 127.0.0.1:{port} within 0.5 s (Connection refused)" in str(error.value)
    assert "--machine_rank 0" in str(error.value)


def test_a_machine_0_that_comes_late_is_waited_for(plan: Any) -> None:
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        timer = threading.Timer(0.5, late.listen)
        began = time.monotonic()
        timer.start()
        reach_machine_0(other_machine(plan), late.getsockname()[1], listens=False)
        assert time.monotonic() - began >= 0.5
        timer.join()


def test_a_bad_timeout_is_rejected(plan: Any) -> None:
    with pytest.raises(LaunchError, match="timeout=soon is not allowed"):
        reach_machine_0(other_machine(plan, "--rdzv_conf", "timeout=soon"), 29500, listens=False)


def test_an_unreachable_machine_0_ends_the_command(start: Start) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        flags = (
            "--num_machines",
            "2",
            "--machine_rank",
            "1",
            "--num_processes",
            "2",
            "--rdzv_conf",
            "timeout=1",
        )
        where = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(free.getsockname()[1]))
        run = start("launch", *flags, *where, script="pass\n")
        code, _, error = run.finish(30)

    assert code == 2
    assert error.startswith("accel launch: error: Machine 0 could not be reached")
    run.assert_nothing_left()
