"""Accumulate gradients: steps over 64 images, in micro-batches of 16.

Their activations take a quarter of the memory.

    python gradient_accumulation.py
    python gradient_accumulation.py --micro_batches 1
    accel launch --num_processes 2 --cpu gradient_accumulation.py

All three print the same losses. Inside `accumulate` the optimizer and the schedule do nothing until the
last micro-batch of a window, and the processes exchange gradients only there.
"""

import argparse

import torch
import torch.nn.functional as F
from handwriting import evaluate, loaders, network

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed

BATCH_SIZE = 64  # images per optimizer step, over all processes and micro-batches

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--micro_batches", type=int, default=4, help="micro-batches per optimizer step")
args = parser.parse_args()

accelerator = Accelerator(
    gradient_accumulation_steps=args.micro_batches,
    # The batch size of a loader is that over all processes.
    dataloader_config=DataLoaderConfiguration(split_batches=True),
)
set_seed(0)
train_data, test_data = loaders(BATCH_SIZE // args.micro_batches)
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=88)  # counts optimizer steps
model, optimizer, scheduler, train_data, test_data = accelerator.prepare(
    model, optimizer, scheduler, train_data, test_data
)

step = 0
losses = []  # of the micro-batches of a window
for _ in range(4):
    for images, labels in train_data:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # acts at the window's end
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:  # the window's end: a step was made
            step += 1
            if step % 11 == 0:
                mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                rate = scheduler.get_last_lr()[0]
                accelerator.print(f"step {step}: loss {mean:.6f}, next learning rate {rate:.6f}")
            losses.clear()
accuracy = evaluate(accelerator, model, test_data)
accelerator.print(f"{step} steps over {BATCH_SIZE} images each, test accuracy {accuracy:.4f}")
accelerator.end_training()
