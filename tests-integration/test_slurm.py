"""Jobs of a real Slurm: its own daemons on this machine, which stands for two of the cluster's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Torch starts in every process, and the machine may be busy.
pytestmark = pytest.mark.timeout(300)

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "squeue", "scontrol")
# Names that every system can look up: rank 0 listens on the first.
CONF = """
ClusterName=accel
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=127.0.0.[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] CPUs=2
PartitionName=main Nodes=ALL Default=YES MaxTime=5 State=UP
"""
SCRIPT = """
import contextlib
import os
import torch
from accel import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1))
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURMD_NODENAME")
rank, size = accelerator.process_index, accelerator.num_processes
print(rank, "of", size, int(total), *(os.environ[name] for name in names), flush=True)
accelerator.end_training()
"""


def free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start Slurm; yield the environment of its users."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here (Debian: slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd runs as root alone")
    folder = tmp_path_factory.mktemp("slurm")
    folder.parent.chmod(0o755)  # munge looks at who may write where its socket lies
    for name in ("state", "spool-127.0.0.1", "spool-127.0.0.2"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, ports=free_ports(3)))
    environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "CUDA_VISIBLE_DEVICES": ""}
    environ["HF_HOME"] = str(folder)
    files = {name: str(folder / f"munge.{name}") for name in ("key", "socket", "pid", "log", "seed")}
    munged = [f"--{name}-file={files[name]}" for name in ("key", "pid", "log", "seed")]
    try:
        run(["mungekey", "-c", "-k", files["key"]], environ)
        run(["munged", "--force", f"--socket={files['socket']}", *munged], environ)
        run(["slurmctld", "-c"], environ)
        for name in ("127.0.0.1", "127.0.0.2"):
            run(["slurmd", "-N", name], environ)
        until = time.monotonic() + 60
        while run(["sinfo", "-h", "-o", "%T %D"], environ).split() != ["idle", "2"]:
            assert time.monotonic() < until, run(["sinfo", "-N", "-l"], environ)
            time.sleep(0.2)
        yield environ
    finally:
        # The controller last but munged: it hears from the others that they end.
        for name in ("slurmd-127.0.0.2", "slurmd-127.0.0.1", "slurmctld", "munge"):
            end(folder / f"{name}.pid")


def run(command: list[str], environ: dict[str, str], folder: Path | None = None) -> str:
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def end(pid_file: Path) -> None:
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text())
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + 20
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/cmdline").read_text():  # empty for one that has ended
            assert time.monotonic() < until, f"{pid_file.name} does not end"
            time.sleep(0.05)


def launch(folder: Path) -> list[str]:
    (folder / "train.py").write_text(SCRIPT)
    return [sys.executable, "-m", "accel_launch", "launch", "--cpu", "train.py"]


def test_each_task_of_a_step_is_a_worker(slurm: dict[str, str], tmp_path: Path) -> None:
    output = run(["srun", "--nodes=1", "--ntasks=2", *launch(tmp_path)], slurm, tmp_path)

    assert sorted(output.splitlines()) == ["0 of 2 3 0 2 0 127.0.0.1", "1 of 2 3 1 2 0 127.0.0.1"]


def test_a_batch_script_starts_on_all_machines_of_its_job(slurm: dict[str, str], tmp_path: Path) -> None:
    job = ["sbatch", "--parsable", "--nodes=2", "--output=job.log", f"--wrap={' '.join(launch(tmp_path))}"]
    number = run(job, slurm, tmp_path).strip()
    until = time.monotonic() + 200
    while run(["squeue", "--noheader", f"--jobs={number}"], slurm):  # sbatch --wait looks every ten seconds
        assert time.monotonic() < until, run(["scontrol", "show", "job", number], slurm)
        time.sleep(0.1)

    assert "JobState=COMPLETED" in run(["scontrol", "show", "job", number], slurm)
    lines = [line for line in (tmp_path / "job.log").read_text().splitlines() if " of " in line]
    assert sorted(lines) == ["0 of 2 3 0 1 0 127.0.0.1", "1 of 2 3 0 1 1 127.0.0.2"]
