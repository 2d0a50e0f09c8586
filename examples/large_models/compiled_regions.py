"""torch.compile by regions: the repeated block is compiled once, however many layers there are.

    python compiled_regions.py
    python compiled_regions.py --num_blocks 16
    accel launch --num_processes 2 --cpu compiled_regions.py --backend eager

The first step compiles, and takes about as long for 16 blocks as for 4. Without `use_regional_compilation`
the full model is compiled, which takes longer with each layer. Names of weights and checkpoints are those
of the plain model. The backend "inductor" needs a C++ compiler on the CPU; "eager" compiles nothing and
shows the rest.
"""

import argparse
import time

import torch
from small_gpt import GPT, loss_of, windows

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import TorchDynamoPlugin, set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--num_blocks", type=int, default=4)
parser.add_argument("--backend", default="inductor", help='"inductor", "eager", or "no" for no compilation')
args = parser.parse_args()

accelerator = Accelerator(
    dynamo_plugin=TorchDynamoPlugin(backend=args.backend, use_regional_compilation=True),
    dataloader_config=DataLoaderConfiguration(split_batches=True),
)
set_seed(0)
model = GPT(args.num_blocks)
names = list(model.state_dict())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, data = accelerator.prepare(model, optimizer, windows(batch_size=8))

seconds = []
for step, (inputs, labels, positions) in enumerate(data, start=1):
    begin = time.perf_counter()
    loss = loss_of(model(inputs, positions), labels)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()  # waits for the device
    seconds.append(time.perf_counter() - begin)
    if step % 6 == 0:
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"step {step}: loss {mean:.6f}")
later = sorted(seconds[1:])[len(seconds) // 2]
accelerator.print(f"first step {seconds[0]:.2f} s, later ones {1000 * later:.1f} ms")
accelerator.print("names of the plain model:", list(accelerator.get_state_dict(model)) == names)
accelerator.end_training()
