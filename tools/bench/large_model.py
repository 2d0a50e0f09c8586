"""A model laid out as Llama is, in any size, and how torch's own calls shard it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    layers: int
    width: int
    inner: int
    heads: int
    groups: int  # heads of keys and of values
    words: int


LARGE = Sizes(layers=80, width=8192, inner=28672, heads=64, groups=8, words=128256)
"""Those of Llama 3.1 70B."""

SMALL = Sizes(layers=4, width=64, inner=128, heads=16, groups=8, words=256)
"""For steps that are really made."""


class Attention(nn.Module):
    """Causal attention with fewer heads of keys and values than of queries."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.features = sizes.width // sizes.heads
        narrow = self.features * sizes.groups
        self.q_proj, self.o_proj = (nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(sizes.width, narrow, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same."""
        parts = (layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.unflatten(-1, (-1, self.features)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(sizes.width, sizes.inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One layer, of which each part has a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same."""
        x = x + self.attention(self.norm_1(x))
        added: torch.Tensor = self.feed_forward(self.norm_2(x))
        return x + added


class LargeModel(nn.Module):
    """A language model without positions."""

    _no_split_modules = ("Layer",)
    _tp_plan = {  # noqa: RUF012 - as transformers' models have it
        **{f"layers.*.attention.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.attention.o_proj": "rowwise",
        **{f"layers.*.feed_forward.{name}_proj": "colwise" for name in ("gate", "up")},
        "layers.*.feed_forward.down_proj": "rowwise",
    }

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, length) to logits (batch, length, words)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def by_hand(model: LargeModel, shards: DeviceMesh, tensor: DeviceMesh | None) -> LargeModel:
    """Shard a model on the meta device with torch's own calls, layer by layer.

    Each layer gets memory and the first process's weights just before it is sharded: a model of this size
    is never in memory as a whole.

    Args:
        model: The model.
        shards: Replicas x shards, with names.
        tensor: The axis of tensor parallelism; None: weights are not split.
    """
    styles: dict[str, Callable[[], Any]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {name.removeprefix("layers.*."): styles[style]() for name, style in model._tp_plan.items()}
    axes = [shards[name] for name in shards.mesh_dim_names or ()] + ([] if tensor is None else [tensor])
    for module in [*model.layers, model]:
        _receive(module, [axis.get_group() for axis in axes])
        if tensor is not None and module is not model:
            parallelize_module(module, tensor, plan, src_data_rank=None)
        fully_shard(module, mesh=shards)
    return model


def _receive(module: nn.Module, groups: list[Any]) -> None:
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                whole = torch.empty_like(parameter, device="cpu")
                for group in groups:
                    dist.broadcast(whole, group=group, group_src=0)
                setattr(part, name, nn.Parameter(whole))
