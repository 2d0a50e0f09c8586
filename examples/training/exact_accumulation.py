"""Accumulate exactly by tokens: the gradient of a window is that of the mean over all its tokens.

    python exact_accumulation.py
    python exact_accumulation.py --micro_batches 1
    accel launch --num_processes 2 --cpu exact_accumulation.py

All three print the same losses, though lines of text differ in length: a mean of means would weigh a
micro-batch of short lines like one of long lines. So `backward` gets the sum of the losses, and their
number as its weight. The model guesses the next byte in the source code of Python's own argparse.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed

BATCH_SIZE = 64  # lines per optimizer step, over all processes and micro-batches
IGNORED = -100  # the label of padding, which cross_entropy passes over

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--micro_batches", type=int, default=4, help="micro-batches per optimizer step")
args = parser.parse_args()


def collate(lines: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels, padded to the longest line; each label is the byte that comes next."""
    padded = pad_sequence([torch.tensor(list(line)) for line in lines], True, IGNORED)
    return padded[:, :-1].clamp(min=0), padded[:, 1:]


accelerator = Accelerator(
    gradient_accumulation_steps=args.micro_batches,
    dataloader_config=DataLoaderConfiguration(split_batches=True),
)
set_seed(0)
text = Path(argparse.__file__).read_bytes().splitlines(keepends=True)
lines = [line for line in text if len(line) > 1][: 25 * BATCH_SIZE]
data = DataLoader(lines, BATCH_SIZE // args.micro_batches, shuffle=True, drop_last=True, collate_fn=collate)
model = nn.Sequential(nn.Embedding(256, 64), nn.Tanh(), nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
model, optimizer, data = accelerator.prepare(model, optimizer, data)

step = 0
totals = torch.zeros(2, device=accelerator.device)  # of a window: sum of the losses, number of bytes
for inputs, labels in data:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
        num_tokens = (labels != IGNORED).sum()
        accelerator.backward(loss, weight=num_tokens)
        optimizer.step()
        optimizer.zero_grad()
    totals += torch.stack([loss.detach(), num_tokens])
    if accelerator.sync_gradients:
        step += 1
        loss_sum, count = accelerator.reduce(totals, "sum").tolist()
        accelerator.print(f"step {step}: loss {loss_sum / count:.6f} over {count:.0f} bytes")
        totals.zero_()
accelerator.end_training()
