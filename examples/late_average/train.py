"""Training with the engine of this package; it prints the same on one process and on several."""

import torch
from late_average import LateAverageSettings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[LateAverageSettings()])
torch.manual_seed(accelerator.process_index)
model = nn.Linear(4, 1, dtype=torch.float64)
if accelerator.is_main_process:
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
inputs = torch.arange(64, dtype=torch.float64).reshape(16, 4) / 64
data = DataLoader(
    TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4 // accelerator.num_processes
)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
accelerator.print(f"engine {accelerator.engine.name}")
for inputs, targets in data:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            accelerator.print(f"gradient norm {norm:.6f}")
        optimizer.step()
        optimizer.zero_grad()
accelerator.print(f"weight {model.weight[0, 0].item():.6f}")
accelerator.end_training()
