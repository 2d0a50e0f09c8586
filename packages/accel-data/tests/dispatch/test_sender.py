"""What goes wrong on process 0 while it reads for all reaches all of them, within a deadline."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from accel_data import prepare_data_loader
from accel_state.process.state import current_process

pytestmark = pytest.mark.usefixtures("fresh_state")


class Numbers(Dataset):
    def __init__(self, act=lambda index: None):
        self.act = act

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.act(index)
        return index


def dispatched(loader):
    return prepare_data_loader(loader, dispatch_batches=True)


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("accel-data")]


def die(index):
    if index == 9:
        os.kill(os.getpid(), signal.SIGKILL)


def fail_late(index):
    if index == 9:
        raise OSError("disk is gone")


def collate_by_rank(samples):
    return {"x": torch.tensor(samples)} if samples[0] % 4 else torch.tensor(samples)


def collate_late_by_rank(samples):
    return {"x": torch.tensor(samples)} | ({"y": 1} if samples[0] == 10 else {})


def collate_late_unpicklable(samples):
    return [lambda: 0] if samples[0] == 10 else torch.tensor(samples)


BAD = {
    "worker dies": lambda: DataLoader(Numbers(die), 2, num_workers=1),
    "late": lambda: DataLoader(Numbers(fail_late), 2),
    "late in a worker": lambda: DataLoader(Numbers(fail_late), 2, num_workers=1),
    "structure": lambda: DataLoader(range(24), 2, collate_fn=collate_by_rank),
    "late structure": lambda: DataLoader(range(24), 2, collate_fn=collate_late_by_rank),
    "unpicklable": lambda: DataLoader(range(24), 2, collate_fn=collate_late_unpicklable),
    "no workers": lambda: DataLoader(
        Numbers(lambda index: None), 2, num_workers=1, multiprocessing_context="spawn"
    ),
    "sampler": lambda: DataLoader(range(24), 2, sampler=(1 // (9 - index) for index in range(24))),
}
TEXTS = {
    "worker dies": r"DataLoader worker.* (killed by signal|exited unexpectedly)",
    "late": "disk is gone",
    "late in a worker": "disk is gone",
    "structure": "batch is a Tensor for process 0, but a dict of",
    "late structure": r"batch is a dict of \['x'\] for process 0, but a dict of \['x', 'y'\] for process 1",
    "unpicklable": r"(batch\[0\] is of type function|batch is a Tensor for process 0, but a list)",
    "no workers": "pickle",
    "sampler": "division",
}


def bad_input(kind):
    loader = dispatched(BAD[kind]())
    with pytest.raises(Exception, match=TEXTS[kind]) as caught:
        list(loader)
    if not current_process().is_main:
        assert "Process 0, which reads the data for all processes, failed: " in str(caught.value)
    dist.barrier()  # the processes still understand each other
    assert threads() == []


@pytest.mark.parametrize("kind", BAD)
def test_an_error_of_process_0_ends_the_loop_of_all(world, kind):
    world.run(bad_input, kind, size=2)  # torch takes up to 15 seconds where a worker dies


def changing(samples):
    number = samples[0] // 4  # the step
    return [torch.tensor(samples), {"x": torch.tensor(samples)}, (samples, None), {"y": samples}][number % 4]


def changes():
    return list(dispatched(DataLoader(range(24), 2, collate_fn=changing)))


def test_structures_may_change_from_step_to_step(world):
    _, seen = world.run(changes, size=2)

    assert seen[0].tolist() == [2, 3]
    assert seen[1]["x"].tolist() == [6, 7]
    assert seen[2:4] == [([10, 11], None), {"y": [14, 15]}]
    assert seen[5]["x"].tolist() == [22, 23]


class BadEpochs(Numbers):
    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def set_epoch(self, epoch):
        if current_process().rank == self.bad:
            raise OSError(f"no epoch {epoch}")


def cannot_start():
    loader = dispatched(DataLoader(BadEpochs(0), 2))
    with pytest.raises((OSError, RuntimeError), match="no epoch 0"):
        list(loader)
    dist.barrier()


def test_an_epoch_that_process_0_cannot_start(world):
    world.run(cannot_start, size=2)
