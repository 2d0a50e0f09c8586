"""A whole engine in one file: replicas whose gradients are averaged after each window's last backward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.engines import ENGINES, Engine, EngineRow
from accel.utils import DistributedType
from accel_ops.collectives import operations


class LateAverage(Engine):
    """Every process holds the whole model, and nothing is sent while backward runs."""

    name = "late average"

    def __init__(self, context):
        super().__init__(context)
        self.trained = []

    @property
    def data_shard(self):
        """Every process has its own share of the data."""
        return self.context.process.rank, self.context.process.world_size

    def wrap_model(self, model):
        """Start from the first process's weights."""
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        self.trained += [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model

    def backward(self, loss, **kwargs):
        """Average at the end of a window; what was averaged already stays as it is."""
        super().backward(loss, **kwargs)
        if self.context.gradient_state.sync_gradients:
            for parameter in self.trained:
                if parameter.grad is not None:
                    parameter.grad = operations.reduce(parameter.grad, "mean", process=self.context.process)

    def total_weight(self, weight, dtype):
        """Add up the weight of backward(loss, weight=...) over the processes."""
        weight = torch.as_tensor(weight, dtype=dtype, device=self.context.process.device)
        return float(operations.reduce(weight, "sum", process=self.context.process))


ENGINES[DistributedType.MULTI_CPU] = EngineRow(f"{__name__}:LateAverage", "pip install torch")

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
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
