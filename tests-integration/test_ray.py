"""`accel launch --launcher ray` on a Ray cluster of two nodes, both of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_state.imports.packages import install_hint

pytest.importorskip("ray", reason=install_hint("ray", "accel-launch"))

pytestmark = pytest.mark.timeout(300)

# The GPUs are Ray's bookkeeping alone: it believes what it is told.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=2, num_gpus=2)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
REPORT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
         "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_NUM_PROCESSES", "ACCELERATE_MIXED_PRECISION",
         "CUDA_VISIBLE_DEVICES")
print(json.dumps([{name: os.environ.get(name) for name in names}, sys.argv[1:], os.getcwd()]))
"""
# Joins the others, starts a child, and then ends as its argument says.
WAIT = """
import os, subprocess, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(90)", sys.argv[0]])
total = torch.ones(1)
dist.all_reduce(total)
open(f"{sys.argv[0]}.{dist.get_rank()}", "w").write(f"{total.item():g}")
print("out", dist.get_rank())
if dist.get_rank() == 1:
    exec(sys.argv[1])
time.sleep(60)
"""

# A program of Ray's that launches, each time on all of the cluster, after a launch that found no room.
DRIVER = """
import sys, time, ray
from ray.util import placement_group_table
from accel_launch import launch_command, launch_command_parser
from accel_launch.errors import LaunchError
ray.init(log_to_driver=False, logging_level="ERROR")
for number, timeout in ((4, "0.5"), (3, "20"), (3, "20")):
    flags = ["--launcher", "ray", "--cpu", f"--num_processes={number}", f"--rdzv_conf=timeout={timeout}"]
    try:
        launch_command(launch_command_parser().parse_args([*flags, sys.argv[1]]))
    except LaunchError as error:
        print(type(error).__name__, flush=True)
until = time.monotonic() + 10
while states := {group["state"] for group in placement_group_table().values()} - {"REMOVED"}:
    assert time.monotonic() < until, states
    time.sleep(0.1)
"""

Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("ray") / "log"
    with log.open("w") as errors:
        cluster = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert cluster.stdout is not None
    line = cluster.stdout.readline()
    assert line, log.read_text()
    yield line.strip()
    cluster.communicate(timeout=60)


@pytest.fixture
def launch(address: str, tmp_path: Path) -> Iterator[Launch]:
    runs: list[subprocess.Popen[str]] = []

    def start(source: str, *flags: str, arguments: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(source)
        command = [sys.executable, "-m", "accel_launch", "launch", "--launcher", "ray", *flags]
        runs.append(
            subprocess.Popen(
                [*command, str(script), *arguments],
                cwd=tmp_path,
                env={**os.environ, "RAY_ADDRESS": address, "HF_HOME": str(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
        run.communicate()
    wait_until(lambda: not left(tmp_path), "the workers to end")


def left(folder: Path) -> list[int]:
    """Return the processes that run the script, or were started by it."""
    entry = str(folder / "script.py").encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if entry in words and b"accel_launch" not in words:
            found.append(int(path.parent.name))
    return found


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wait_until(true: Callable[[], Any], what: str, timeout_s: float = 30) -> None:
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def test_each_worker_knows_its_place_on_its_machine(launch: Launch, tmp_path: Path) -> None:
    out, error = launch(
        REPORT, "--cpu", "--num_processes", "3", "--mixed_precision", "bf16", arguments=("--x", "1")
    ).communicate(timeout=120)
    found = sorted(map(json.loads, out.splitlines()), key=lambda worker: int(worker[0]["RANK"]))
    places = [place for place, _, _ in found]

    assert [place["RANK"] for place in places] == ["0", "1", "2"], error
    machines = [(p["GROUP_RANK"], p["LOCAL_RANK"], p["LOCAL_WORLD_SIZE"]) for p in places]
    two = [("0", "0", "2"), ("0", "1", "2"), ("1", "0", "1")]
    one = [("0", "0", "1"), ("1", "0", "2"), ("1", "1", "2")]
    assert machines in (two, one)
    assert {(p["WORLD_SIZE"], p["GROUP_WORLD_SIZE"], p["ACCELERATE_NUM_PROCESSES"]) for p in places} == {
        ("3", "2", "3")
    }
    assert len({(place["MASTER_ADDR"], place["MASTER_PORT"]) for place in places}) == 1
    assert {place["ACCELERATE_MIXED_PRECISION"] for place in places} == {"bf16"}
    assert [rest for _, *rest in found] == [[["--x", "1"], str(tmp_path)]] * 3


def test_there_is_a_worker_per_gpu_and_each_sees_those_of_its_machine(launch: Launch) -> None:
    out, error = launch(REPORT).communicate(timeout=120)
    places = [json.loads(line)[0] for line in out.splitlines()]

    assert sorted(place["LOCAL_RANK"] for place in places) == ["0", "1"], error
    assert [sorted(place["CUDA_VISIBLE_DEVICES"].split(",")) for place in places] == [["0", "1"]] * 2
    assert len({place["CUDA_VISIBLE_DEVICES"] for place in places}) == 1


def test_the_first_failure_ends_all_with_its_traceback_code_and_logs(launch: Launch, tmp_path: Path) -> None:
    run = launch(
        WAIT,
        *("--cpu", "--num_processes", "2", "--tee", "3", "--log_dir", "logs"),
        arguments=("raise ValueError('boom')",),
    )
    out, error = run.communicate(timeout=120)

    assert run.returncode == 1, error
    assert [(tmp_path / f"script.py.{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    assert sorted(out.splitlines()) == ["[rank0]: out 0", "[rank1]: out 1"]
    assert "rank 1 of 2 on " in error
    assert "failed (exit code 1); 1 other was stopped." in error
    assert error.count("ValueError: boom") == 1
    assert error.rstrip().endswith("ValueError: boom")
    (folder,) = (tmp_path / "logs").iterdir()
    assert (folder / "1/stdout.log").read_text() == "out 1\n"
    assert not left(tmp_path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_all_stop_with_the_launcher_and_nothing_outlives_it(
    launch: Launch, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = launch(WAIT, "--cpu", "--num_processes", "2", arguments=("pass",))
    wait_until(lambda: all((tmp_path / f"script.py.{rank}").exists() for rank in (0, 1)), "the workers", 90)
    assert len(left(tmp_path)) == 4
    run.send_signal(signal.SIGTSTP)
    wait_until(lambda: stopped(run.pid), "the launcher to stop")
    assert all(map(stopped, left(tmp_path)))
    run.send_signal(signal.SIGCONT)
    wait_until(lambda: not any(map(stopped, left(tmp_path))), "the workers to go on")
    run.send_signal(number)
    run.communicate(timeout=60)

    assert run.returncode == code
    wait_until(lambda: not left(tmp_path), "the workers to end")


def test_a_killed_worker_is_the_one_that_is_named(launch: Launch) -> None:
    run = launch(WAIT, "--cpu", "--num_processes", "2", arguments=("os.kill(os.getpid(), 9)",))
    _, error = run.communicate(timeout=120)

    assert run.returncode == 137
    assert "failed (killed by SIGKILL" in error
    assert "rank 1 of 2" in error


def test_a_program_of_rays_gets_the_room_back(address: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')\n")
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": address, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert run.stdout.split() == ["LaunchError", *["ran"] * 6], run.stderr
    assert run.returncode == 0, run.stderr


def test_sigterm_ends_the_wait_for_room(launch: Launch) -> None:
    run = launch("", "--cpu", "--num_processes", "4", "--rdzv_conf", "timeout=90")
    assert run.stderr is not None
    assert run.stderr.readline().startswith("accel launch: waiting up to 90 s for 4 workers")
    run.send_signal(signal.SIGTERM)
    _, error = run.communicate(timeout=60)

    assert (run.returncode, error.splitlines()) == (
        143,
        ["accel launch: SIGTERM: ended, as no worker runs."],
    )


def test_a_cluster_that_is_too_small_is_waited_for_and_named(launch: Launch, tmp_path: Path) -> None:
    run = launch("open('ran', 'w')\n", "--cpu", "--num_processes", "4", "--rdzv_conf", "timeout=0.5")
    _, error = run.communicate(timeout=120)

    assert run.returncode == 2
    assert "no room within 0.5 s for 4 workers of 1 CPU; the cluster has 3 CPU in all" in error
    assert not (tmp_path / "ran").exists()
