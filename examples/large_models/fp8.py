"""fp8: linear layers multiply in 8 bits, through torchao; the rest computes in bf16, and weights stay fp32.

    python fp8.py
    python fp8.py --mixed_precision bf16
    accel launch --num_processes 2 --cpu fp8.py

The first two print nearly the same losses. fp8 is meant for large, compiled models on GPUs with fp8 units
(such as NVIDIA's H100); its speed was not measured here. The CPU shows that it trains. It needs torchao,
from accel's extra `fp8`.
"""

import argparse
import itertools

import torch
from small_gpt import GPT, loss_of, windows

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import AORecipeKwargs, set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--mixed_precision", choices=["fp8", "bf16"], default="fp8")
parser.add_argument("--max_steps", type=int, default=6)
args = parser.parse_args()

# The recipe chooses the library. By default the first and the last linear layer stay in bf16.
handlers = [AORecipeKwargs()] if args.mixed_precision == "fp8" else []
accelerator = Accelerator(
    mixed_precision=args.mixed_precision,
    kwargs_handlers=handlers,
    dataloader_config=DataLoaderConfiguration(split_batches=True),
)
set_seed(0)
model = GPT(num_blocks=2)  # a CPU is slow in fp8
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, data = accelerator.prepare(model, optimizer, windows(batch_size=2))
kinds = [type(layer).__name__ for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
num_layers = f"{kinds.count('Float8Linear')} of {len(kinds)}"
accelerator.print(f"{num_layers} linear layers in fp8, weights in {next(model.parameters()).dtype}")

for step, (inputs, labels, positions) in enumerate(itertools.islice(data, args.max_steps), start=1):
    loss = loss_of(model(inputs, positions), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"step {step}: loss {mean:.6f}")
accelerator.end_training()
