"""Inference over several processes: each gets a slice of the inputs, and the results are gathered in order.

    python split_inference.py
    accel launch --num_processes 2 --cpu split_inference.py

Both print the same. The model has counted which byte follows which in one file of Python's standard
library; the question is which other files look least and most like it. Inputs need not be tensors, nor as
many on each process. For batches out of a DataLoader, prepare the loader and use `gather_for_metrics`
instead.
"""

import argparse
from pathlib import Path

import torch
from small_gpt import library

from accel import Accelerator
from accel.utils import gather_object

accelerator = Accelerator()


def pairs_of(path: Path) -> torch.Tensor:
    """Return each byte of a file with the one that follows it: (2, length - 1)."""
    data = torch.tensor(list(path.read_bytes()), device=accelerator.device)
    return torch.stack([data[:-1], data[1:]])


counts = torch.ones(256, 256, device=accelerator.device)
first, second = pairs_of(Path(argparse.__file__))
counts.index_put_((first, second), torch.ones(len(first), device=accelerator.device), accumulate=True)
log_probabilities = (counts / counts.sum(dim=1, keepdim=True)).log()

files = [path for path in library() if path.stem.isalpha()][:60]
with accelerator.split_between_processes(files) as share:
    print(f"process {accelerator.process_index} has {len(share)} of {len(files)} files")
    scores = []
    for path in share:
        first, second = pairs_of(path)
        scores.append((path.name, -log_probabilities[first, second].mean().item()))
scores = gather_object(scores)  # a list of all, in the order of `files`

ranked = sorted(scores, key=lambda score: score[1])
for title, part in (("most like argparse.py:", ranked[:5]), ("least like argparse.py:", ranked[-5:])):
    accelerator.print(title)
    for name, score in part:
        accelerator.print(f"  {name:16} {score:.4f} nats per byte")
accelerator.end_training()
