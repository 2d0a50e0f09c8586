"""Local SGD: each process takes 8 steps on its own, then their weights are averaged; for slow networks.

    accel launch --num_processes 2 --cpu local_sgd.py
    accel launch --num_processes 4 --cpu local_sgd.py --local_sgd_steps 16

DDP exchanges gradients in every step. This exchanges weights once in 8 steps, an eighth of the traffic, and
is another training: between two averages the processes drift apart.
"""

import argparse

import torch
import torch.nn.functional as F
from handwriting import evaluate, loaders, network

from accel import Accelerator
from accel.local_sgd import LocalSGD
from accel.utils import set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--local_sgd_steps", type=int, default=8, help="steps between two averages")
args = parser.parse_args()

accelerator = Accelerator()
set_seed(0)
train_data, test_data = loaders(batch_size=16)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, train_data, test_data = accelerator.prepare(model, optimizer, train_data, test_data)


def distance() -> float:
    """Return how far the processes' output layers are apart: the largest difference of a weight."""
    weights = accelerator.gather(accelerator.unwrap_model(model)[-1].weight.detach()[None])
    return (weights - weights.mean(dim=0)).abs().max().item()


for epoch in range(5):
    with LocalSGD(accelerator, model, local_sgd_steps=args.local_sgd_steps) as local_sgd:
        for step, (images, labels) in enumerate(train_data, start=1):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            apart = distance() if step == args.local_sgd_steps else None
            local_sgd.step()
            if apart is not None:
                accelerator.print(f"epoch {epoch}: {apart:.6f} apart after {step} steps alone", end=", ")
                accelerator.print(f"{distance():.6f} after the average", end="; ")
    # Leaving the block averages too: all processes have the same model here.
    accelerator.print(f"test accuracy {evaluate(accelerator, model, test_data):.4f}")
accelerator.end_training()
