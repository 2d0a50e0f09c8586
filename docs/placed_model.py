"""A small GPT, and the device of each of its layers where no device has room for all of them."""

import torch
import torch.nn.functional as F
from torch import nn

from accel import infer_auto_device_map, init_empty_weights

MAX_MEMORY = {0: "3200KB", 1: "1800KB", "cpu": "2500KB"}  # and the disk, without a limit


class Block(nn.Module):
    """Attention and a feed-forward part, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `(batch, length, width)`, as x is."""
        query, key, value = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        x = x + self.projection(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Blocks between an embedding and a head that share their weight."""

    def __init__(self, num_blocks: int = 8, width: int = 128, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits for each of `(batch, length)` tokens."""
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


if __name__ == "__main__":
    with init_empty_weights():
        model = GPT()
    device_map = infer_auto_device_map(model, max_memory=MAX_MEMORY, no_split_module_classes=["Block"])
    for name, device in device_map.items():
        print(f"{name:<10} {device}")
