"""Six micro-batches, four to a window over all processes: the gradients of each way to call backward."""

from itertools import chain

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator

# The loss of an item is weight * item, so that its gradient is the item itself.
MICRO_BATCHES = [[1.0, 2.0, 3.0], [5.0], [2.0, 2.0], [1.0, 4.0, 2.0, 1.0], [6.0], [3.0, 1.0, 2.0]]


class Scale(nn.Module):
    """Multiplies items by one weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, items):
        """Return the loss of each item."""
        return self.weight * items


def gradients(backward):
    """Go through the data once, and return the gradient at the end of each window."""
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 4 // accelerator.num_processes
    model = Scale()
    data = DataLoader(MICRO_BATCHES, collate_fn=lambda rows: torch.tensor(rows[0], dtype=torch.float64))
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), data)
    found = []
    for items in data:
        with accelerator.accumulate(model):
            backward(accelerator, model(items))
            if accelerator.sync_gradients:
                found.append(accelerator.unwrap_model(model).weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    return found, accelerator


WAYS = {
    "backward(losses.sum(), weight=len(losses))": lambda accelerator, losses: accelerator.backward(
        losses.sum(), weight=len(losses)
    ),
    "backward(losses.mean(), weight=1)": lambda accelerator, losses: accelerator.backward(
        losses.mean(), weight=1
    ),
    "backward(losses.mean())": lambda accelerator, losses: accelerator.backward(losses.mean()),
}

windows = [torch.tensor([*chain(*some)]) for some in (MICRO_BATCHES[:4], MICRO_BATCHES[4:])]
rows = {"all items of the window at once": [items.mean().item() for items in windows]}
for name, backward in WAYS.items():
    rows[name], accelerator = gradients(backward)
accelerator.print(f"{'gradient of':44}{'window of 4':>12}{'tail of 2':>12}")
for name, (window, tail) in rows.items():
    accelerator.print(f"{name:44}{window:12.4f}{tail:12.4f}")
accelerator.end_training()
