"""What the scripts of this folder run: a small GPT over bytes, and the source code of Python's own library.

It is written so that every engine can take it: `_no_split_modules` names the class that FSDP shards block
by block, `_tp_plan` says how tensor parallelism splits each layer, and positions are an argument, which
context parallelism splits with the text.
"""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

__all__ = ["GPT", "library", "loss_of", "windows"]

VOCABULARY = 256  # every byte is a token
WIDTH, HEADS = 64, 4
NUM_WINDOWS, LENGTH = 192, 64  # 24 steps of 8 sequences


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, WIDTH) for the same."""
        y = self.norm_1(x)
        # (batch, heads, length, width of a head); under tensor parallelism these are this process's heads.
        query, key, value = (
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Four blocks; 0.25 million parameters."""

    _no_split_modules = ("Block",)
    _tp_plan = {  # noqa: RUF012 - as the models of transformers have it
        "blocks.*.query": "colwise",
        "blocks.*.key": "colwise",
        "blocks.*.value": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits of the byte after each position: both (batch, length) -> (batch, length, 256)."""
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats per byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def library() -> list[Path]:
    """Return the source files at the top of Python's standard library, in order."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def windows(batch_size: int) -> DataLoader:
    """Return batches of inputs, labels (the bytes that come next) and positions, each (batch, LENGTH)."""
    text = b"".join(path.read_bytes() for path in library()[:20])[: NUM_WINDOWS * LENGTH + 1]
    tokens = torch.tensor(list(text))
    inputs, labels = tokens[:-1].view(-1, LENGTH), tokens[1:].view(-1, LENGTH)
    positions = torch.arange(LENGTH)
    data = [(x, y, positions) for x, y in zip(inputs, labels, strict=True)]
    return DataLoader(data, batch_size=batch_size, shuffle=True)
