"""Training in which the last process reads its samples from slower storage."""

import time

import torch
from torch.utils.data import DataLoader, Dataset

from accel import Accelerator
from accel.observe.statistics import StatisticsKwargs

accelerator = Accelerator(
    log_with="jsonl",
    project_dir="runs/slow",
    kwargs_handlers=[StatisticsKwargs(every=10, slow=1.5)],
)
accelerator.init_trackers("sums", config={"lr": 0.02, "batch": 8})


class Numbers(Dataset):
    """Numbers, and their sums."""

    def __len__(self):
        return 803

    def __getitem__(self, index):
        time.sleep(0.0015 if accelerator.is_last_process else 0.0002)  # seconds
        numbers = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return numbers, numbers.sum(0, keepdim=True)


model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(), batch_size=8))
for step, (numbers, sums) in enumerate(loader):
    loss = (model(numbers) - sums).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss}, step=step)
accelerator.save_state("runs/slow/state")
accelerator.end_training()
