"""A user's script with mistakes: each line that ends with `# wrong` is an error. Checked, never run."""

from __future__ import annotations

import torch

from accel import Accelerator
from accel.state import AcceleratorState
from accel.utils import TorchDynamoPlugin, broadcast, gather, pad_across_processes, reduce

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
accelerator.save_state("folder", blocking="no")  # wrong
accelerator.load_state(missing_ok="yes")  # wrong
accelerator.load_state("folder", strict="no")  # wrong
accelerator.prepare_scheduler(net)  # wrong
accelerator.gather_for_metrics({"a": 1}, use_gather_object=True).keys()  # wrong
accelerator.on_process(print)  # wrong
accelerator.on_local_process()  # wrong
Accelerator(kwargs_handlers=[net])  # wrong
AcceleratorState(mixed_precision="bf61")  # wrong
TorchDynamoPlugin(backend="inductr")  # wrong
reduce(torch.ones(2), reduction="avg")  # wrong
gather(torch.ones(2)).lenght  # wrong
broadcast(torch.ones(2)).lenght  # wrong
pad_across_processes([torch.ones(2)]).lenght  # wrong
