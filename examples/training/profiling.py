"""Profile a few steps: which operators take the time, on which process, and a trace to view.

    python profiling.py
    accel launch --num_processes 2 --cpu profiling.py --output_dir traces

Prints a table, on several processes of the means over them and of the one that took longest. The traces,
one per process, open in https://ui.perfetto.dev.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from handwriting import loaders, network

from accel import Accelerator
from accel.utils import ProfileKwargs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--output_dir", type=Path, default=Path("traces"), help="where traces go")
args = parser.parse_args()

options = ProfileKwargs(
    # Leave out 2 steps, run 1 with the profiler that is not recorded, record 3.
    schedule_option={"wait": 2, "warmup": 1, "active": 3, "repeat": 1},
    output_trace_dir=str(args.output_dir),
    summary=5,  # print the five operators that take most
)
accelerator = Accelerator(kwargs_handlers=[options])
train_data, _ = loaders(batch_size=32)
model = network()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, train_data = accelerator.prepare(model, optimizer, train_data)

with accelerator.profile() as profiler:
    for images, labels in train_data:
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()  # what the schedule counts
accelerator.wait_for_everyone()  # for the traces of the others
accelerator.print("traces:", *sorted(path.name for path in args.output_dir.iterdir()))
accelerator.end_training()
