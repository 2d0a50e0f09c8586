"""A user's script with mistakes: each line that ends with `# wrong` is an error. Checked, never run."""

from __future__ import annotations

import torch

from accel import Accelerator

Accelerator(mixed_precison="bf16")  # wrong
Accelerator(mixed_precision="bf61")  # wrong
Accelerator(dynamo_backend="inductr")  # wrong
Accelerator(log_with="tensorbord")  # wrong
Accelerator(rng_types=["tortch"])  # wrong
Accelerator(gradient_accumulation_steps="4")  # wrong
Accelerator(deepspeed_plugin=object())  # wrong

accelerator = Accelerator()
net = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(net, sgd)
optimizer.parameters()  # wrong
only = accelerator.prepare(net, sgd, net)[3]  # wrong
accelerator.reduce(torch.ones(2), reduction="average")  # wrong
accelerator.backward("loss")  # wrong
accelerator.clip_grad_norm_(model.parameters())  # wrong
accelerator.prepare_model(sgd)  # wrong
accelerator.gather(torch.ones(2)).lenght  # wrong
accelerator.prapare(net)  # wrong
