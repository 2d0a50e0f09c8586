"""40 steps straight, or 17 steps, a checkpoint and the rest: the parameters are the same bit for bit.

(A kill while saving is in test_interruptions.py, a signal in test_preemption.py.)
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accel.accelerator import Accelerator
from accel_data.seeds import sample_generator

pytestmark = pytest.mark.usefixtures("fresh_state")

STEPS, SAVED_AT = 40, 17
SLOW_S = 100  # workers of loaders start again in every epoch


class Noisy(Dataset):
    """Samples that are changed at random, as augmentation does."""

    def __len__(self) -> int:
        return 52

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(3, generator=sample_generator(index))
        return torch.full((3,), index / 52) + 0.1 * noise, torch.tensor([index % 7 / 7])


def train(folder: str, options: dict, resume: bool = False) -> list[torch.Tensor]:
    """Train to the end, with a save on the way, or from there."""
    torch.manual_seed(99 if resume else 0)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=options["precision"],
        gradient_accumulation_steps=options["accumulation"],
        step_scheduler_with_optimizer=True,
    )
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200)
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=options["workers"])
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    if not resume:
        torch.manual_seed(accelerator.process_index)
    step = 0
    if resume:
        accelerator.load_state(folder)
        step = SAVED_AT
    while step < STEPS:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                if step == 9 and accelerator.scaler is not None:
                    loss = loss * float("inf")  # a step that the scaler skips
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step += 1
            if step == SAVED_AT and not resume:
                accelerator.save_state(folder, blocking=options["blocking"])
            if step == STEPS:
                break
    accelerator.wait_for_save()
    return [parameter.detach().clone() for parameter in accelerator.unwrap_model(model).parameters()]


def straight_and_resumed(folder: str, options: dict) -> bool:
    straight = train(folder, options)
    resumed = train(folder, options, resume=True)
    return all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


CASES = [
    {"precision": "fp16", "accumulation": 1, "workers": 0, "blocking": True},
    # Step 17 is in the middle of a window.
    {"precision": "fp16", "accumulation": 3, "workers": 0, "blocking": False},
    {"precision": "fp16", "accumulation": 2, "workers": 2, "blocking": True},
    {"precision": "bf16", "accumulation": 4, "workers": 2, "blocking": False},
]


@pytest.mark.timeout(SLOW_S)
@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_a_resumed_run_is_the_straight_one(tmp_path, options):
    assert straight_and_resumed(str(tmp_path / "state"), options)


@pytest.mark.timeout(SLOW_S)
@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_also_on_two_processes(world, tmp_path, options):
    folder = str(tmp_path / "state")
    assert world.run(straight_and_resumed, folder, options, timeout_s=SLOW_S) == [True, True]
