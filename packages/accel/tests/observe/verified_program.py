"""A small program with one fault, by its first argument; what `accel verify` is tested on."""

import sys
import warnings

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import set_seed

warnings.simplefilter("ignore")  # some faults are told by warnings of their own
fault = sys.argv[1]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 if fault == "optimizer" else 1)
set_seed(1)
if fault == "weights":
    torch.seed()  # as in a program of its own that sets none

layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
if fault == "batch norm":
    layers.insert(1, torch.nn.BatchNorm1d(8))
if fault == "dropout":
    layers.insert(2, torch.nn.Dropout(0.3))
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

numbers = torch.Generator().manual_seed(2)
inputs = torch.randn(64, 6, generator=numbers)
targets = inputs.sum(dim=1, keepdim=True) + torch.arange(64).unsqueeze(1) / 16
counts = torch.randint(1, 9, (64, 1), generator=numbers)  # items of each sample
if fault == "shuffle":
    torch.seed()
loader = DataLoader(TensorDataset(inputs, targets, counts), batch_size=4, shuffle=True)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=len(loader))

if fault != "model":
    model = accelerator.prepare(model)
if fault != "optimizer":
    optimizer = accelerator.prepare(optimizer)
if fault != "loader":
    loader = accelerator.prepare(loader)
schedule = accelerator.prepare(schedule)

for _ in range(3):
    for x, y, n in loader:
        with accelerator.accumulate(model):
            errors = (model(x) - y).square()
            if fault == "mean of means":
                accelerator.backward((errors * n).sum() / n.sum())
            elif fault == "weighted":
                accelerator.backward((errors * n).sum(), weight=n.sum())
            elif fault == "sum":
                accelerator.backward(errors.sum())
            else:
                accelerator.backward(errors.mean())
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    if fault == "raises":
        raise ValueError("planted")
accelerator.end_training()
print("trained to the end")
