"""save_on_preemption and the flag behind it, also under the real launchers."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel.accelerator import Accelerator
from accel.training.any_rank_flag import AnyRankFlag
from accel_ckpt.config import ProjectConfiguration
from accel_state.process.state import current_process
from accel_world.program import run_program

pytestmark = pytest.mark.usefixtures("fresh_state")


def outcomes(who: int, when: int) -> tuple[list[bool], list[bool]]:
    process = current_process()
    flag = AnyRankFlag(process)
    ahead = []
    for step in range(6):
        ahead.append(flag.check_previous(process.rank == who and step >= when))
        dist.all_reduce(torch.ones(3))  # what the run does meanwhile
    waiting = AnyRankFlag(process)
    return ahead, [waiting.check("test", process.rank == who and step == when) for step in range(4)]


@pytest.mark.parametrize("who", [0, 2])
def test_all_learn_in_the_same_round_whether_anyone_said_yes(world, who):
    for ahead, asked in world.run(outcomes, who, 2, size=3):
        assert ahead == [False, False, False, True, True, True]  # the round before
        assert asked == [False, False, True, False]


def test_a_signal_saves_at_the_next_step_but_one_and_exits(tmp_path):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    before = signal.getsignal(signal.SIGUSR1)
    folder = str(tmp_path / "state")
    steps = []
    with pytest.raises(SystemExit) as ended:  # noqa: PT012
        for step in range(20):
            with accelerator.accumulate():
                pass
            if step == 4:
                signal.raise_signal(signal.SIGUSR1)
            steps.append(step)
            accelerator.save_on_preemption(folder)

    assert ended.value.code == 75
    assert steps[-1] == 7  # boundaries are 1, 3, 5, 7: asked at 5, agreed at 7
    assert os.path.isdir(folder)
    assert signal.getsignal(signal.SIGUSR1) == before


class Noting(Accelerator):
    """Writes a note next to what is saved, as a subclass may."""

    def save_state(self, output_dir=None, **options):
        folder = super().save_state(output_dir, **options)
        Path(folder).with_suffix(".note").write_text("saved")
        return folder


def test_a_subclass_saves_in_its_own_way(tmp_path):
    accelerator = Noting()
    with pytest.raises(SystemExit):  # noqa: PT012
        for _ in range(5):
            accelerator.save_on_preemption(str(tmp_path / "state"))  # takes the signal
            signal.raise_signal(signal.SIGUSR1)

    assert (tmp_path / "state.note").read_text() == "saved"


def test_the_last_chance_is_used_although_the_save_before_failed(tmp_path):
    accelerator = Accelerator()

    def fail(models, weights, output_dir):
        os.rmdir(output_dir)

    handle = accelerator.register_save_state_pre_hook(fail)
    accelerator.save_state(str(tmp_path / "a"), blocking=False)
    handle.remove()
    accelerator.save_on_preemption(str(tmp_path / "b"))
    signal.raise_signal(signal.SIGTERM)
    accelerator.save_on_preemption(str(tmp_path / "b"))
    with pytest.warns(UserWarning, match="The save before failed"), pytest.raises(SystemExit):
        accelerator.save_on_preemption(str(tmp_path / "b"))
    assert sorted(os.listdir(tmp_path)) == ["b"]


def test_the_path_that_is_reported_is_there_next_to_checkpoints_of_another_run(tmp_path, capsys):
    config = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True, "total_limit": 1}
    Accelerator(project_config=ProjectConfiguration(**config, iteration=7)).save_state()
    accelerator = Accelerator(project_config=ProjectConfiguration(**config))
    accelerator.save_on_preemption()
    signal.raise_signal(signal.SIGTERM)
    accelerator.save_on_preemption()
    with pytest.warns(UserWarning, match="this one is checkpoint_8"), pytest.raises(SystemExit):
        accelerator.save_on_preemption()
    told = re.search(r"saved (\S+); exiting with 75", capsys.readouterr().err)

    assert told is not None
    assert os.listdir(tmp_path / "checkpoints") == [os.path.basename(told[1])]
    assert os.path.isdir(told[1])


def test_what_is_wrong_is_named_at_the_first_call(tmp_path):
    accelerator = Accelerator()
    with pytest.raises(ValueError, match="save_on_preemption needs output_dir"):
        accelerator.save_on_preemption()
    errors = []

    def call() -> None:
        try:
            accelerator.save_on_preemption(str(tmp_path / "a"))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "only the main thread" in errors[0]


def test_the_users_handler_is_called_too_and_comes_back(tmp_path):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        naming = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
        accelerator = Accelerator(project_config=naming)
        accelerator.save_on_preemption()
        signal.raise_signal(signal.SIGUSR1)
        accelerator.end_training()
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert seen == [signal.SIGUSR1] * 2


# Under the real launchers

SCRIPT = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator

folder, result, how, stop = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
loader = DataLoader(data, batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
torch.manual_seed(accelerator.process_index)

class Count:
    step = 0
    def state_dict(self): return {"step": self.step}
    def load_state_dict(self, state): self.step = state["step"]

count = Count()
accelerator.register_for_checkpointing(count)
if accelerator.load_state(folder, missing_ok=True):
    print(f"resumed at {count.step}")
while count.step < 30:
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        count.step += 1
        if count.step == stop:
            if how == "worker" and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if how == "usr1" and accelerator.process_index == 0:
                os.kill(os.getpid(), signal.SIGUSR1)
            if how == "launcher" and accelerator.process_index == 0:
                os.kill(os.getppid(), signal.SIGTERM)
        if how == "launcher" and count.step >= stop:
            import time; time.sleep(0.05)  # until the launcher has passed it on
        accelerator.save_on_preemption(folder)
        if count.step == 30:
            break
if accelerator.is_main_process:
    torch.save([p.detach() for p in accelerator.unwrap_model(model).parameters()], result)
accelerator.end_training()
"""


def run_to_the_end(world, folder, checkpoint):
    """Run the script with no signal, and return what it printed and the parameters at the end."""
    (folder / "script.py").write_text(SCRIPT)
    arguments = [str(folder / "script.py"), str(checkpoint), str(folder / "end.pt"), "no", "0"]
    printed = world.run(run_program, *arguments, init=False)
    return "".join(printed), torch.load(folder / "end.pt")


@pytest.fixture(scope="module")
def straight(world, tmp_path_factory):
    """Return the parameters at the end of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight")
    return run_to_the_end(world, folder, folder / "none")[1]


@pytest.mark.long
@pytest.mark.parametrize("how", ["worker", "usr1", "launcher"])
def test_under_the_launcher_all_save_exit_and_resume_bit_for_bit(launched, world, tmp_path, straight, how):
    folder, end = tmp_path / "state", tmp_path / "end.pt"
    first = launched(SCRIPT, str(folder), str(end), how, "13")
    assert first.returncode == os.EX_TEMPFAIL, first.stderr
    assert "exiting with 75" in first.stderr
    assert not end.exists()
    printed, resumed = run_to_the_end(world, tmp_path, folder)
    assert printed.count("resumed at") == 2

    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
