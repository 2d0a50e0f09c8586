"""DeepSpeed's ZeRO under the same loop: stage 1, 2 or 3 shards optimizer states, gradients, parameters.

    accel launch --num_processes 2 --cpu deepspeed_zero.py --zero_stage 2
    accel launch --num_processes 2 --cpu deepspeed_zero.py --zero_stage 3

Both print the losses of fsdp2.py. It needs DeepSpeed, from accel's extra `deepspeed`. The model and its
optimizer are prepared in one call. A file with DeepSpeed's own settings goes into `hf_ds_config`.
"""

import argparse

import torch
from small_gpt import GPT, loss_of, windows

from accel import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
from accel.utils import set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--zero_stage", type=int, choices=[1, 2, 3], default=2)
args = parser.parse_args()

accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(zero_stage=args.zero_stage),
    dataloader_config=DataLoaderConfiguration(split_batches=True),
)
set_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, data = accelerator.prepare(model, optimizer, windows(batch_size=8))
accelerator.print(f"engine: {accelerator.engine.name}")

for step, (inputs, labels, positions) in enumerate(data, start=1):
    loss = loss_of(model(inputs, positions), labels)
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)  # the norm before this step's clipping
    optimizer.step()
    optimizer.zero_grad()
    if step % 6 == 0:
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"step {step}: loss {mean:.6f}, gradient norm {float(norm):.4f}")
accelerator.end_training()
