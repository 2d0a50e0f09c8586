"""A small program that is varied, or has a fault, by its first argument; `accel verify` is tested on it."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.utils import DataLoaderConfiguration, set_seed

warnings.simplefilter("ignore")  # some faults have their own warnings
kind = sys.argv[1]
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2 if kind in ("optimizer", "accumulation", "weighted accumulation") else 1,
    dataloader_config=DataLoaderConfiguration(split_batches=kind == "split batches"),
    fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=int(kind[-1])) if "fsdp" in kind else None,
)
set_seed(1)
if kind == "weights":
    torch.seed()  # as in a program of its own that sets none


class Words(torch.nn.Module):
    """The mean of the words of a sentence, padded to the longest of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = torch.nn.Embedding(9, 6), torch.nn.Linear(6, 1)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        found = self.words(input_ids) * attention_mask.unsqueeze(-1)
        return self.last(found.sum(dim=1) / attention_mask.sum(dim=1, keepdim=True))


def join(
    samples: list[tuple[torch.Tensor, ...]],
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    sentences = [torch.arange(int(n)) % 8 + 1 for _, _, n in samples]
    ids = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=7)
    mask = torch.nn.utils.rnn.pad_sequence([item > 0 for item in sentences], batch_first=True).long()
    _, y, n = map(torch.stack, zip(*samples, strict=True))
    return {"input_ids": ids, "attention_mask": mask}, y, n


layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
if kind == "batch norm":
    layers.insert(1, torch.nn.BatchNorm1d(8))
if kind == "dropout":
    layers.insert(2, torch.nn.Dropout(0.3))
model = Words() if kind == "padding" else torch.nn.Sequential(*layers)

numbers = torch.Generator().manual_seed(2)
samples = {"short epoch": 20, "short": 24, "read ahead": 24}.get(kind, 64)
inputs = torch.randn(samples, 6, generator=numbers)
targets = inputs.sum(dim=1, keepdim=True) + torch.arange(samples).unsqueeze(1) / 16
counts = torch.randint(1, 9, (samples, 1), generator=numbers)  # items of each sample
if kind == "shuffle":
    torch.seed()
loader = DataLoader(
    TensorDataset(inputs, targets, counts),
    batch_size=3 if kind == "batches of three" else 4,
    shuffle=True,
    collate_fn=join if kind == "padding" else None,
)

if kind != "model":
    model = accelerator.prepare(model)
optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05)]
if kind == "two optimizers":
    optimizers = [
        torch.optim.AdamW(model.module[i].parameters(), lr=0.05)
        if hasattr(model, "module")
        else torch.optim.AdamW(model[i].parameters(), lr=0.05)
        for i in (0, 2)
    ]
schedule = torch.optim.lr_scheduler.LinearLR(optimizers[0], 1.0, 0.1, total_iters=len(loader))
if kind not in ("optimizer", "optimizer without accumulation"):
    optimizers = [accelerator.prepare(item) for item in optimizers]
if kind != "loader":
    loader = accelerator.prepare(loader)
schedule = accelerator.prepare(schedule)


def read_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Read the batch after the one that is handed out, too."""
    held = []
    for batch in batches:
        yield from held
        held = [batch]
    yield from held


for _ in range(3):
    for number, (x, y, n) in enumerate(read_ahead(loader) if kind == "read ahead" else loader):
        if kind == "evaluation":
            model.eval()
            for other, *_ in accelerator.prepare(DataLoader(TensorDataset(inputs), batch_size=7)):
                with torch.no_grad():
                    model(other)
                break
            model.train()
        with accelerator.accumulate(model):
            if kind == "noise":
                x = x + torch.randn_like(x)
            errors = ((model(**x) if kind == "padding" else model(x)) - y).square()
            if kind == "mean of means":
                accelerator.backward((errors * n).sum() / n.sum())
            elif kind.startswith("weighted"):
                accelerator.backward((errors * n).sum(), weight=n.sum())
            elif kind == "sum":
                accelerator.backward(errors.sum())
            else:
                accelerator.backward(errors.mean())
            if kind == "one process alone" and number == 1 and not accelerator.is_main_process:
                next(model.parameters()).grad.mul_(2)
            if kind == "factor" and accelerator.num_processes > 1:
                for item in model.parameters():
                    item.grad.mul_(3)
            accelerator.clip_grad_norm_(model.parameters(), 1.0 if kind == "factor" else 10.0)
            for optimizer in optimizers:
                optimizer.step()
            schedule.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
accelerator.end_training()
print("trained to the end")
