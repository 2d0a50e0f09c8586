"""Context parallelism: long sequences are split over the processes, with ring attention.

    python context_parallel.py
    accel launch --num_processes 2 --cpu context_parallel.py

Both print the same losses. Inside the context all tensors with one entry per token (also the positions)
hold this process's shard. It needs a model that calls `scaled_dot_product_attention`, and sequences whose
length divides by twice the number of processes.
"""

import torch
from small_gpt import GPT, loss_of, windows

from accel import Accelerator, ParallelismConfig, PartialState
from accel.utils import set_seed

processes = PartialState().num_processes
accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=processes))
set_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
# Every process of a group reads the same batch, so this is the size of the full batch.
model, optimizer, data = accelerator.prepare(model, optimizer, windows(batch_size=8))

for step, (inputs, labels, positions) in enumerate(data, start=1):
    length = inputs.shape[1]
    with accelerator.maybe_context_parallel(
        buffers=[inputs, labels, positions],
        buffer_seq_dims=[1, 1, 1],
        no_restore_buffers={inputs, labels, positions},  # not used after the step
    ):
        loss = loss_of(model(inputs, positions), labels)
        accelerator.backward(loss)
        if step == 1:
            print(f"process {accelerator.process_index} works on {inputs.shape[1]} of {length} bytes")
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 6 == 0:
        mean = accelerator.reduce(loss.detach(), "mean").item()  # all shards are equally long
        accelerator.print(f"step {step}: loss {mean:.6f}, gradient norm {float(norm):.4f}")
accelerator.end_training()
