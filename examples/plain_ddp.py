"""Sharded, exact, resumable data in a plain PyTorch script: only accel-data, without an Accelerator.

    python examples/plain_ddp.py
    torchrun --nproc_per_node 2 examples/plain_ddp.py

Both print the same losses. A stopped run can continue with another number of processes:

    torchrun --nproc_per_node 2 examples/plain_ddp.py --checkpoint state.pt --stop_after 30
    python examples/plain_ddp.py --checkpoint state.pt
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from accel_data import prepare_data_loader, sample_generator


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Handwritten digits of 8 by 8 pixels."""

    def __init__(self, rows: slice, augment: bool) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[rows], dtype=torch.float32) / 16  # (N, 8, 8)
        self.labels = torch.tensor(digits.target[rows])  # (N,)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if self.augment:
            # Drawn for this sample in this epoch: the same whichever process or worker reads it.
            generator = sample_generator(index)
            shift = int(torch.randint(-1, 2, (), generator=generator))
            image = image.roll(shift, dims=1) + 0.05 * torch.randn(8, 8, generator=generator)
        return image.flatten(), self.labels[index]


def main() -> None:
    args = parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    train_data = DataLoader(
        Digits(slice(1438), augment=True),
        batch_size=32,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
    )
    test_data = DataLoader(Digits(slice(1438, None), augment=False), batch_size=32)
    # Batches of 32 samples over all processes, so that the training does not depend on their number.
    train_data = prepare_data_loader(train_data, device, split_batches=True, put_on_device=True)
    test_data = prepare_data_loader(test_data, device, put_on_device=True)

    step = load(args.checkpoint, model, optimizer, train_data)
    while train_data.iteration < args.num_epochs:  # each pass is an epoch, or what is left of it
        for images, labels in train_data:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            print_once(f"step {step}: loss {mean(loss):.8f}")
            if step == args.stop_after:
                save(args.checkpoint, model, optimizer, train_data, step)
                return
    num_correct, num_images = evaluate(model, test_data)
    print_once(f"test accuracy {num_correct / num_images:.4f} on {num_images} images")


@torch.no_grad()
def evaluate(model: nn.Module, data: Any) -> tuple[int, int]:
    """Count each test image once: the padding of the last batches is dropped."""
    counts = torch.zeros(2, dtype=torch.int64)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for images, labels in data:
        real = len(labels) if data.real_samples is None else data.real_samples[rank]
        correct = (model(images).argmax(dim=1) == labels)[:real]
        counts += torch.tensor([int(correct.sum()), real])
    if dist.is_initialized():
        counts = counts.to(next(model.parameters()).device)
        dist.all_reduce(counts)
    num_correct, num_images = counts.tolist()
    return num_correct, num_images


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, step: int) -> None:
    """Write all that a run needs to resume; the loader's position is the same on every process."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    weights = getattr(model, "module", model).state_dict()
    state = {"model": weights, "optimizer": optimizer.state_dict(), "data": data.state_dict(), "step": step}
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)  # complete or absent


def load(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> int:
    """Go on from a checkpoint, if there is one; returns the number of steps taken."""
    if path is None or not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    getattr(model, "module", model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    data.load_state_dict(state["data"])
    return int(state["step"])


def mean(loss: torch.Tensor) -> float:
    """Return the mean over all processes."""
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def print_once(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num_epochs", type=int, default=8)
    parser.add_argument(
        "--workers", type=int, default=0, help="worker processes of the training data's loader"
    )
    parser.add_argument("--checkpoint", type=Path, help="saved at the stop, and resumed from if it exists")
    parser.add_argument("--stop_after", type=int, help="number of the step after which to save and stop")
    args = parser.parse_args()
    if args.stop_after is not None and args.checkpoint is None:
        parser.error("--stop_after needs a --checkpoint to save to")
    return args


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        main()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
