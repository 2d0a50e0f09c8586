"""Two machines: two network namespaces that see each other over one cable, and nothing else.

The script learns from 24 samples, which every number of processes shares in the same global batches. It saves
after each batch, and resumes from the newest checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# Torch starts in every process, on every machine, and the machine may be busy.
pytestmark = [pytest.mark.timeout(300), pytest.mark.machines]

STEPS = 12
SCRIPT = """
import os, signal, sys, time
import torch
from accel import Accelerator
from accel.utils import DataLoaderConfiguration, ProjectConfiguration

accelerator = Accelerator(
    dataloader_config=DataLoaderConfiguration(split_batches=True),
    project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2),
)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(torch.arange(96.0).reshape(24, 4) / 96, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
resumed = int(os.path.isdir("run/checkpoints"))
if resumed:
    accelerator.load_state()
else:
    accelerator.save_state()
rank, size = accelerator.process_index, accelerator.num_processes
for batch in loader:
    step = accelerator.project_configuration.iteration
    machine = os.environ["GROUP_RANK"]
    print(f"step {step} rank {rank} of {size}, machine {machine}, resumed {resumed}", flush=True)
    if (step, rank, resumed) == (5, 1, 0) and "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state()
    # Alone until another machine joins, then together until it is lost, then alone to the end.
    while "elastic" in sys.argv and (step, size, rank) in ((3, 1, 0), (7, 2, 1)):
        time.sleep(1)
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")
accelerator.end_training()
"""


def expected() -> dict[str, torch.Tensor]:
    """The weights after all steps on one process that was never stopped, without accel."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in (torch.arange(96.0).reshape(24, 4) / 96).split(2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Machine:
    """One namespace, with what was launched in it."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.runs: list[subprocess.Popen[bytes]] = []

    def launch(self, folder: Path, *arguments: str) -> Path:
        """Start `accel launch`; return the file of its output."""
        environ = {name: text for name, text in os.environ.items() if not name.startswith("ACCELERATE_")}
        environ |= {"HF_HOME": str(folder / "hf"), "CUDA_VISIBLE_DEVICES": ""}
        command = [f"{sysconfig.get_path('scripts')}/accel", "launch", "--cpu", *arguments]
        output = folder / f"{self.name}.log"
        with output.open("w") as log:
            run = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command], cwd=folder, env=environ, stdout=log, stderr=log
            )
        self.runs.append(run)
        return output

    def wait(self, timeout_s: float) -> int:
        """Wait for what was launched last; return its exit code."""
        return self.runs[-1].wait(timeout_s)

    def pull_the_plug(self) -> None:
        """Kill everything on it at once."""
        for pid in ip("netns", "pids", self.name).split():
            os.kill(int(pid), 9)
        for run in self.runs:
            run.wait()


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines, joined by a cable."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here (Debian: iproute2)")
    names = [f"accel-{os.getpid()}-{letter}" for letter in "ab"]
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        if "not permitted" not in error.stderr and "denied" not in error.stderr:
            raise
        pytest.skip(f"network namespaces need a privilege: {error.stderr.strip()}")
    found = (Machine(names[0], "10.213.7.1"), Machine(names[1], "10.213.7.2"))
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "cable", "netns", names[1])
        for machine in found:
            ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "cable")
            ip("-n", machine.name, "link", "set", "cable", "up")
            ip("-n", machine.name, "link", "set", "lo", "up")
        yield found
        for machine in found:
            assert ip("netns", "pids", machine.name) == "", "something was left running"
    finally:
        for machine in found:
            if machine.name in ip("netns", "list").split():
                machine.pull_the_plug()
                ip("netns", "del", machine.name)


def wait_for(true: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def places(output: str) -> list[tuple[int, ...]]:
    """(step, rank, size, machine, resumed) of each line that the script printed."""
    found = re.findall(r"step (\d+) rank (\d+) of (\d+), machine (\d+), resumed (\d+)", output)
    return [tuple(map(int, numbers)) for numbers in found]


def assert_trained(folder: Path) -> None:
    torch.testing.assert_close(torch.load(folder / "weights.pt"), expected())


def test_two_machines_train_as_one(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", machines[0].address]
    logs = [
        machine.launch(tmp_path, *flags, "--machine_rank", str(rank), "train.py")
        for rank, machine in enumerate(machines)
    ]
    codes = [machine.wait(200) for machine in machines]

    assert codes == [0, 0], "".join(log.read_text() for log in logs)
    for rank, log in enumerate(logs):  # each has the rank that it was given
        assert places(log.read_text()) == [(step, rank, 2, rank, 0) for step in range(1, STEPS + 1)]
    assert_trained(tmp_path)


def test_a_killed_worker_is_started_again_and_resumes(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", machines[0].address]
    logs = [
        machine.launch(tmp_path, *flags, "--max_restarts", "1", "train.py", "kill") for machine in machines
    ]
    codes = [machine.wait(200) for machine in machines]
    output = "".join(log.read_text() for log in logs)

    assert codes == [0, 0], output
    seen = places(output)
    assert {(rank, machine) for _, rank, _, machine, _ in seen} == {(0, 0), (1, 1)}
    assert {step for step, _, _, _, resumed in seen if not resumed} == set(range(1, 6))
    assert {step for step, _, _, _, resumed in seen if resumed} == set(range(5, STEPS + 1))
    assert_trained(tmp_path)


def test_a_machine_joins_is_lost_and_the_run_continues(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    checkpoints = tmp_path / "run/checkpoints"
    flags = ["--num_machines", "1:2", "--num_processes", "2", "--main_process_ip", machines[0].address]
    flags += ["--rdzv_backend", "c10d", "--max_restarts", "3"]
    # The defaults wait half a minute for more machines, and a quarter for one that is gone.
    flags += ["--rdzv_conf", "last_call_timeout=8,keep_alive_interval=2,keep_alive_max_attempt=3"]
    log = machines[0].launch(tmp_path, *flags, "train.py", "elastic")
    wait_for(lambda: (checkpoints / "checkpoint_1").exists(), "the first machine to begin alone")
    machines[1].launch(tmp_path, *flags, "train.py", "elastic")
    wait_for(lambda: (checkpoints / "checkpoint_7").exists(), "the two to train together")
    machines[1].pull_the_plug()
    code = machines[0].wait(150)

    assert code == 0, log.read_text()
    assert [(step, size) for step, _, size, _, _ in places(log.read_text())] == [
        *((step, 1) for step in (1, 2, 3)),
        *((step, 2) for step in (4, 5, 6, 7, 8)),
        *((step, 1) for step in range(8, STEPS + 1)),
    ]
    assert_trained(tmp_path)
