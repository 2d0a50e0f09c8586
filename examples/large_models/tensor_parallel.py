"""Tensor parallelism: each linear layer is split over the processes, which work on the same sequences.

    python tensor_parallel.py
    accel launch --num_processes 2 --cpu tensor_parallel.py

Both print the same losses. The model's `_tp_plan` names for each layer how it is split, as models of
transformers have it: by columns going in, by rows coming out, with one all-reduce after attention and one
after the feed-forward layers. To combine it with shards or replicas, give `ParallelismConfig` a
`dp_shard_size` or a `dp_replicate_size` too.
"""

import torch
from small_gpt import GPT, loss_of, windows
from torch.distributed.tensor import DTensor

from accel import Accelerator, ParallelismConfig, PartialState
from accel.utils import set_seed

processes = PartialState().num_processes
accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=processes))
set_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
# Every process of a group reads the same batch, so this is the size of the full batch.
model, optimizer, data = accelerator.prepare(model, optimizer, windows(batch_size=8))
weight = model.blocks[0].up.weight
part = weight.to_local() if isinstance(weight, DTensor) else weight
shapes = f"{tuple(part.shape)} of {tuple(weight.shape)}"
print(f"process {accelerator.process_index} has the part {shapes} of blocks.0.up.weight")

for step, (inputs, labels, positions) in enumerate(data, start=1):
    loss = loss_of(model(inputs, positions), labels)
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)  # of the full gradient
    optimizer.step()
    optimizer.zero_grad()
    if step % 6 == 0:
        accelerator.print(f"step {step}: loss {loss.item():.6f}, gradient norm {float(norm):.4f}")
accelerator.end_training()
