"""Train a small byte-level GPT on the source code of Python's own standard library.

    python language_model.py
    accel launch --num_processes 2 --cpu language_model.py --max_steps 200
    torchrun --nproc_per_node 2 language_model.py --gradient_accumulation_steps 2

Notable:
- The data is on every machine that has Python: about 30 MB of real text. It is written once to a cache
  file by the first process of each machine, and memory-mapped by all of them.
- Every 20th file is held out; perplexity (per byte) is measured on those, over all processes.
- `--batch_size` is the number of sequences per optimizer step, over all processes and accumulation
  steps, so the same value gives the same training however it is split.
- Warm-up and cosine schedule, gradient accumulation, clipping. The default model has 0.8 million
  parameters; 200 steps need about two minutes on one CPU core.

Legend: B = batch, T = position in the sequence, C = embedding, H = heads.
"""

import argparse
import hashlib
import math
import os
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Subset

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed, tqdm

VOCABULARY = 256  # every byte is a token
HELD_OUT_EVERY = 20  # one file in 20 is kept for evaluation


# --- Data


def stdlib_files() -> list[Path]:
    """Return the standard library's source files in a fixed order, without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(path.parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def write_cache(files: list[Path], cache_dir: Path, split: str) -> Path:
    """Concatenate files into one file of cache_dir, unless that was done before, and return its path.

    The name has a digest of the files' names and sizes: another Python gets its own cache. The
    rename is atomic, so that no process ever maps a half-written file.
    """
    listing = "".join(f"{path}:{path.stat().st_size}\n" for path in files)
    cache = cache_dir / f"stdlib-{hashlib.sha256(listing.encode()).hexdigest()[:12]}-{split}.bin"
    if not cache.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache_dir, delete=False) as file:
            for path in files:
                file.write(path.read_bytes())
        os.replace(file.name, cache)
    return cache


class Windows(Dataset):
    """Cuts a file of bytes into consecutive sequences; targets are the inputs moved by one byte."""

    def __init__(self, path: Path, block_size: int) -> None:
        self.data = np.memmap(path, dtype=np.uint8, mode="r")
        self.block_size = block_size

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.block_size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.block_size
        window = torch.from_numpy(self.data[start : start + self.block_size + 1].astype(np.int64))
        return window[:-1], window[1:]


# --- Model


class Block(nn.Module):
    """One transformer block: attention and a feed-forward layer, each behind a layer norm."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.attention_norm = nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.out = nn.Linear(n_embd, n_embd)
        self.mlp_norm = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream with what this block adds: (B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(B, T, 3, self.n_head, C // self.n_head)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, C / H)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A causal transformer over bytes, with learned positions and a tied output layer."""

    def __init__(self, block_size: int, n_layer: int, n_head: int, n_embd: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, n_embd)
        self.positions = nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # What is added to the residual stream starts smaller, the more layers add to it (GPT-2).
                residual = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * n_layer) if residual else 0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte at each position: (B, T) -> (B, T, 256)."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def sequence_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of each sequence in nats per byte: (B, T, 256), (B, T) -> (B,)."""
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1)


# --- Training


def learning_rate_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Rise linearly over the warm-up, then fall on half a cosine to a tenth of the peak."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@torch.no_grad()
def perplexity(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, int]:
    """Return the perplexity per byte, and the number of sequences that it was measured on."""
    model.eval()
    gathered = []
    for inputs, targets in loader:
        losses = sequence_losses(model(inputs), targets)
        gathered.append(accelerator.gather_for_metrics(losses).double())
    losses = torch.cat(gathered)
    return math.exp(losses.mean().item()), len(losses)


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    loader: DataLoader,
    args: argparse.Namespace,
) -> None:
    """Train for args.max_steps optimizer steps, as many passes over the data as that takes."""
    model.train()
    progress = tqdm(total=args.max_steps, desc="training", leave=False)
    window: list[torch.Tensor] = []  # losses of the micro-batches since the last optimizer step
    step = 0
    while step < args.max_steps:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = sequence_losses(model(inputs), targets).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                lr = scheduler.get_last_lr()[0]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            window.append(loss.detach())
            if not accelerator.sync_gradients:
                continue
            step += 1
            progress.update()
            if step % args.log_every == 0 or step == args.max_steps:
                # Only now is there a collective and a wait for the device.
                mean_loss = accelerator.reduce(torch.stack(window).mean(), reduction="mean").item()
                if accelerator.is_main_process:
                    progress.write(f"step {step}: loss {mean_loss:.8f}, learning rate {lr:.2e}")
            window = []
            if step == args.max_steps:
                break
    progress.close()


def main(args: argparse.Namespace) -> None:
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        # A loader's batch size counts the sequences of all processes, not those of each.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    num_micro_batches = accelerator.gradient_accumulation_steps  # the launcher's flag comes before ours
    if args.batch_size % num_micro_batches:
        raise ValueError(
            f"--batch_size {args.batch_size} cannot be cut into --gradient_accumulation_steps "
            f"{num_micro_batches} equal micro-batches"
        )
    set_seed(args.seed)

    files = stdlib_files()
    held_out = files[::HELD_OUT_EVERY]
    kept = [file for index, file in enumerate(files) if index % HELD_OUT_EVERY != 0]
    # The first process of each machine writes the cache; the others wait, and find it.
    with accelerator.local_main_process_first():
        train_path = write_cache(kept, args.cache_dir, "train")
        test_path = write_cache(held_out, args.cache_dir, "held-out")
    train_set = Windows(train_path, args.block_size)
    held_out_set = Windows(test_path, args.block_size)
    # Spread evenly over the held-out files rather than taken from the first of them.
    stride = max(1, len(held_out_set) // args.eval_sequences)
    test_set = Subset(held_out_set, range(0, len(held_out_set), stride)[: args.eval_sequences])

    micro_batch = args.batch_size // num_micro_batches
    train_loader = DataLoader(train_set, batch_size=micro_batch, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    if len(train_loader) == 0:
        raise ValueError(
            f"--batch_size {args.batch_size} is more than the {len(train_set)} sequences of "
            f"{args.block_size} bytes that the text gives; take a smaller batch or --block_size"
        )
    model = GPT(args.block_size, args.n_layer, args.n_head, args.n_embd)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, args.warmup_steps, args.max_steps)
    )
    num_parameters = sum(weight.numel() for weight in model.parameters())
    accelerator.print(f"{num_parameters / 1e6:.2f} M parameters, {len(train_set.data) / 1e6:.1f} MB of text")
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    train(accelerator, model, optimizer, scheduler, train_loader, args)
    value, num_sequences = perplexity(accelerator, model, test_loader)
    accelerator.print(f"held-out perplexity {value:.6f} per byte on {num_sequences} sequences")
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--max_steps", type=int, default=200, help="optimizer steps")
    add("--warmup_steps", type=int, default=20, help="optimizer steps of rising learning rate")
    add("--batch_size", type=int, default=24, help="sequences per optimizer step, over all processes")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per optimizer step")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--max_grad_norm", type=float, default=1.0, help="gradients are clipped to this norm")
    add("--block_size", type=int, default=128, help="bytes per sequence")
    add("--n_layer", type=int, default=4)
    add("--n_head", type=int, default=4)
    add("--n_embd", type=int, default=128)
    add("--eval_sequences", type=int, default=499, help="held-out sequences, at most")
    add("--log_every", type=int, default=10, help="number of steps between losses that are printed")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], default=None)
    add("--seed", type=int, default=0)
    add("--cpu", action="store_true", help="train on the CPU even where there is an accelerator")
    add("--cache_dir", type=Path, default=Path.home() / ".cache" / "accel-examples")
    args = parser.parse_args()
    if args.n_embd % args.n_head:
        parser.error(f"--n_embd {args.n_embd} is not a multiple of --n_head {args.n_head}")
    return args


if __name__ == "__main__":
    main(parse_args())
