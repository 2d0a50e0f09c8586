"""Prints the gradient of one weight after each of six micro-batches, on every process, as JSON."""

import json

import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import gather_object

accelerator = Accelerator(gradient_accumulation_steps=4)
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
items = torch.tensor(
    [2.0, 6.0, 1.0, 5.0, 3.0, 7.0, 1.0, 3.0, 6.0, 2.0, 5.0, 1.0]
)  # in turn to both processes
model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(items[:, None], batch_size=1))
weight = accelerator.unwrap_model(model).weight
found = []
for item in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(item).sum())  # its gradient is the item
        assert weight.grad is not None
        before = weight.item()
        row = {"gradient": weight.grad.item(), "ends": accelerator.sync_gradients}
        optimizer.step()
        optimizer.zero_grad()
        found.append({**row, "stepped": weight.item() != before})
every = gather_object([found])
accelerator.print(json.dumps(every))
accelerator.end_training()
