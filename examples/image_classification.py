"""Train a small CNN on scikit-learn's digits (1797 images of 8x8 pixels), on any number of processes.

    python image_classification.py
    accel launch image_classification.py
    accel launch --num_processes 2 --cpu image_classification.py --with-tracking
    torchrun --nproc_per_node 2 image_classification.py

Notable:
- `--batch_size` is the number of images per optimizer step, over all processes and accumulation steps.
  The same value therefore gives the same training, however it is split.
- The test set has 359 images, a prime: no batch and no number of processes divides it, and yet every
  image is counted once, because gather_for_metrics knows which samples are padding.
- Needs a few seconds on one CPU core and downloads nothing.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from digits import load_digits
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Subset, TensorDataset

from accel import Accelerator, DataLoaderConfiguration
from accel.tracking import GeneralTracker
from accel.utils import set_seed, tqdm

TEST_SIZE = 359
CLASSES = 10


class CNN(nn.Module):
    """Two convolutions and two linear layers, 39 thousand parameters.

    No dropout and no batch norm: nothing in it depends on how a batch is split over processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.head = nn.Linear(64, CLASSES)

    def forward(
        self,
        images: torch.Tensor,  # (batch, 1, 8, 8)
    ) -> torch.Tensor:  # (batch, 10)
        """Return the logits of the ten digits."""
        x = F.relu(self.conv1(images))  # (batch, 16, 8, 8)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # (batch, 32, 4, 4)
        return self.head(F.relu(self.hidden(x.flatten(1))))


class JSONLinesTracker(GeneralTracker):
    """Writes one JSON object per line: the smallest useful experiment tracker."""

    name = "json_lines"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def start(self) -> None:
        """Open the file; init_trackers calls this, only on the main process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("w", buffering=1)  # line by line: a killed run keeps its log

    @property
    def tracker(self) -> TextIO:
        """The open file."""
        return self.file

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the settings of the run as the first line."""
        self.log({"config": values})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one line."""
        self.file.write(json.dumps({"step": step, **values}, default=str) + "\n")

    def finish(self) -> None:
        """Close the file; end_training calls this."""
        self.file.close()


def digits() -> tuple[Subset, Subset]:
    """Return the training set (1438 images) and the test set (359): the same split in every run."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # 0..16 -> 0..1
    dataset = TensorDataset(images, torch.tensor(data.target))
    # Its own generator: the split must not move with --seed.
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    return Subset(dataset, order[TEST_SIZE:]), Subset(dataset, order[:TEST_SIZE])


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, int]:
    """Return the accuracy, and the number of images that it was measured on."""
    model.eval()
    num_correct = num_images = 0
    for images, labels in loader:
        predictions = model(images).argmax(dim=-1)
        # From all processes, in the order of the test set, without the images that only pad the last batch.
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        num_correct += int((predictions == labels).sum())
        num_images += len(labels)
    return num_correct / num_images, num_images


def train_epoch(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    loader: DataLoader,
    max_grad_norm: float,
) -> list[float]:
    """Train for one epoch; return the loss of each optimizer step, averaged over all its images."""
    model.train()
    window: list[torch.Tensor] = []  # losses of the micro-batches since the last optimizer step
    step_losses: list[torch.Tensor] = []
    for images, labels in tqdm(loader, desc="training"):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        window.append(loss.detach())
        if accelerator.sync_gradients:
            step_losses.append(torch.stack(window).mean())
            window = []
    # One collective per epoch; .item() in every step would make the CPU wait for the device.
    return accelerator.reduce(torch.stack(step_losses), reduction="mean").tolist()


def main(args: argparse.Namespace) -> None:
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        # A loader's batch size counts the images of all processes, not those of each.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        log_with=JSONLinesTracker(args.output_dir / "digits.jsonl") if args.with_tracking else None,
    )
    num_micro_batches = accelerator.gradient_accumulation_steps  # the launcher's flag comes before ours
    if args.batch_size % num_micro_batches:
        raise ValueError(
            f"--batch_size {args.batch_size} cannot be cut into --gradient_accumulation_steps "
            f"{num_micro_batches} equal micro-batches"
        )
    if args.with_tracking:
        accelerator.init_trackers("digits", config=vars(args))
    set_seed(args.seed)  # before the model is made: every process starts from the same weights

    train_set, test_set = digits()
    # drop_last: each step averages over a full batch, so that losses compare from step to step.
    micro_batch = args.batch_size // num_micro_batches
    train_loader = DataLoader(train_set, batch_size=micro_batch, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps_per_epoch = math.ceil(len(train_loader) / num_micro_batches)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.num_epochs * steps_per_epoch
    )
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    for epoch in range(args.num_epochs):
        losses = train_epoch(accelerator, model, optimizer, scheduler, train_loader, args.max_grad_norm)
        accuracy, num_images = evaluate(accelerator, model, test_loader)
        first_step = epoch * len(losses) + 1
        for step, loss in enumerate(losses, start=first_step):
            if args.print_losses:
                accelerator.print(f"step {step}: loss {loss:.8f}")
            if args.with_tracking:
                accelerator.log({"loss": loss}, step=step)
        mean_loss = sum(losses) / len(losses)
        accelerator.print(
            f"epoch {epoch}: loss {mean_loss:.4f}, test accuracy {accuracy:.4f} on {num_images} images"
        )
        if args.with_tracking:
            accelerator.log({"epoch": epoch, "accuracy": accuracy}, step=first_step + len(losses) - 1)

    if args.save:
        accelerator.wait_for_everyone()
        weights = accelerator.unwrap_model(model).state_dict()
        accelerator.save(weights, args.output_dir / "model.safetensors", safe_serialization=True)
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--num_epochs", type=int, default=8)
    add("--batch_size", type=int, default=48, help="images per optimizer step, over all processes")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per optimizer step")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--max_grad_norm", type=float, default=1.0, help="gradients are clipped to this norm")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], default=None)
    add("--seed", type=int, default=0)
    add("--cpu", action="store_true", help="train on the CPU even where there is an accelerator")
    add("--with-tracking", "--with_tracking", action="store_true", help="log to OUTPUT_DIR/digits.jsonl")
    add("--output-dir", "--output_dir", type=Path, default=Path("digits-output"), help="where logs go")
    add("--save", action="store_true", help="save the weights to OUTPUT_DIR/model.safetensors")
    add("--print-losses", "--print_losses", action="store_true", help="print the loss of every step")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
