"""FSDP version 2: each process has a shard of the parameters, gradients and optimizer states.

    python fsdp2.py
    accel launch --num_processes 2 --cpu fsdp2.py --output_dir weights

Both print the same losses; on two processes each has half of the parameters. A block's parameters are
gathered while it computes. `save_model` writes full weights, which any other program reads. Without the
plugin in the script, `accel launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy
TRANSFORMER_BASED_WRAP` does the same.
"""

import argparse
from pathlib import Path

import torch
from small_gpt import GPT, loss_of, windows

from accel import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accel.utils import set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--output_dir", type=Path, help="save the weights there")
args = parser.parse_args()

accelerator = Accelerator(
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",  # the classes in the model's _no_split_modules, one by one
    ),
    dataloader_config=DataLoaderConfiguration(split_batches=True),
)
set_seed(0)
model = GPT()
total = sum(weight.numel() for weight in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, data = accelerator.prepare(model, optimizer, windows(batch_size=8))
local = sum(weight.to_local().numel() for weight in model.parameters())
print(f"process {accelerator.process_index} has {local:,} of {total:,} parameters")

for step, (inputs, labels, positions) in enumerate(data, start=1):
    loss = loss_of(model(inputs, positions), labels)
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)  # of the full gradient
    optimizer.step()
    optimizer.zero_grad()
    if step % 6 == 0:
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"step {step}: loss {mean:.6f}, gradient norm {float(norm):.4f}")
if args.output_dir is not None:
    accelerator.save_model(model, args.output_dir)
    accelerator.print("saved:", *sorted(path.name for path in args.output_dir.iterdir()))
accelerator.end_training()
