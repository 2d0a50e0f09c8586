"""A user's script: prepared objects, gathered values and loaders keep their types. Checked, never run."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import assert_type

from accel import Accelerator
from accel.utils import DynamoBackend, LoggerType, PrecisionType


class Net(torch.nn.Module):
    """A model with its own method."""

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return features of shape (rows, 8)."""
        return inputs


Batch = tuple[torch.Tensor, torch.Tensor]


class Rows(Dataset[Batch]):
    """Inputs of shape (2,) and targets of shape (1,)."""

    def __getitem__(self, index: int) -> Batch:
        return torch.ones(2), torch.ones(1)

    def __len__(self) -> int:
        return 4


accelerator = Accelerator(
    mixed_precision="bf16", gradient_accumulation_steps=2, dynamo_backend="inductor", log_with=["tensorboard"]
)
Accelerator(mixed_precision=PrecisionType.BF16, dynamo_backend=DynamoBackend.EAGER, log_with=LoggerType.WANDB)

net = Net()
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
data: DataLoader[Batch] = DataLoader(Rows(), batch_size=2)
steps = torch.optim.lr_scheduler.StepLR(sgd, 1)

assert_type(accelerator.prepare(net), Net)
assert_type(
    accelerator.prepare(net, sgd, data, steps),
    tuple[Net, torch.optim.SGD, DataLoader[Batch], torch.optim.lr_scheduler.StepLR],
)
model, optimizer, loader = accelerator.prepare(net, sgd, data)
assert_type(model, Net)
assert_type(optimizer, torch.optim.SGD)
assert_type(loader, DataLoader[Batch])
assert_type(accelerator.prepare_model(net, evaluation_mode=True), Net)
assert_type(accelerator.prepare_data_loader(data), DataLoader[Batch])
assert_type(accelerator.skip_first_batches(loader, 2), DataLoader[Batch])
assert_type(accelerator.unwrap_model(model), Net)

outputs = model.embed(torch.ones(2, 2))
assert_type(accelerator.gather(outputs), torch.Tensor)
assert_type(accelerator.gather_for_metrics((outputs, [outputs])), tuple[torch.Tensor, list[torch.Tensor]])
assert_type(accelerator.reduce({"loss": outputs}, reduction="mean"), dict[str, torch.Tensor])
assert_type(accelerator.pad_across_processes(outputs, dim=1), torch.Tensor)

with accelerator.split_between_processes(["a", "b"]) as prompts:
    assert_type(prompts, list[str])


@accelerator.on_main_process
def report(value: int) -> str:
    """Return a line."""
    return str(value)


assert_type(report(3), str | None)
