"""The small models of random programs: a transformer with usual and unusual features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from .program import Program

__all__ = [
    "GLOBAL_BATCH",
    "LENGTH",
    "Net",
    "Samples",
    "evaluation_samples",
    "make_net",
    "make_optimizers",
    "make_schedules",
    "mean_loss",
    "sum_loss",
]

VOCAB, WIDTH, HEADS, LENGTH = 11, 8, 2, 8
GLOBAL_BATCH = 8


class Block(torch.nn.Module):
    """Causal attention and a feed-forward layer, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, WIDTH) to the same."""
        parts = (layer(self.norm_1(x)) for layer in (self.q, self.k, self.v))
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result


class Net(torch.nn.Module):
    """A transformer over tokens, with its own parameter and a buffer that counts its forward passes."""

    _no_split_modules = ("Block",)
    _tp_plan = {  # noqa: RUF012 - as transformers' models have it
        **dict.fromkeys(["blocks.*.q", "blocks.*.k", "blocks.*.v", "blocks.*.up"], "colwise"),
        **dict.fromkeys(["blocks.*.out", "blocks.*.down"], "rowwise"),
    }

    blocks: torch.nn.ModuleList
    positions: torch.Tensor
    passes: torch.Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(program.blocks)])
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self.spare = Block() if program.unused else None
        self.shift = torch.nn.Parameter(torch.randn(WIDTH))
        if program.tied:
            self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH), persistent=False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.runs_first_twice = program.shared

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, tokens) to logits (batch, tokens, VOCAB)."""
        if self.training:
            self.passes += 1
        x = self.embed(tokens) + self.positions[: tokens.shape[1]] + self.shift
        for index in [0] * self.runs_first_twice + list(range(len(self.blocks))):
            x = self.blocks[index](x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Sequences of tokens, and the number of each.

    Args:
        count: How many.
        seed: Which.
    """

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCAB, (count, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.tokens[index], index


def evaluation_samples(program: Program) -> torch.Tensor:
    """Tokens (GLOBAL_BATCH, LENGTH + 1) that no epoch has."""
    return Samples(GLOBAL_BATCH, program.seed + 1).tokens


def make_net(program: Program, dtype: torch.dtype, offset: int = 0) -> Net:
    """The model, before anything was trained; another `offset` gives other weights."""
    torch.manual_seed(program.seed + offset)
    net = Net(program).to(dtype)
    if program.frozen:
        net.blocks[0].requires_grad_(False)
    return net


def _owned(program: Program, net: Any) -> list[list[torch.nn.Parameter]]:
    """The parameters of each optimizer."""
    late = set(net.blocks[-1].parameters()) if program.late else set()
    every = [item for item in net.parameters() if item not in late]
    if program.optimizers == 1:
        return [every]
    inner = set(net.blocks.parameters())
    return [[item for item in every if item in inner], [item for item in every if item not in inner]]


def make_optimizers(program: Program, net: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of a program; one whose blocks come late would be empty, and is left out."""
    rate = {"SGD": 0.1, "Adagrad": 0.05, "ASGD": 0.1, "Adadelta": 1.0}.get(program.optimizer, 1e-2)
    options: dict[str, Any] = {"lr": rate}
    if program.optimizer == "SGD":
        options["momentum"] = 0.9
    made = []
    for parameters in _owned(program, net):
        if not parameters:
            continue
        groups: list[dict[str, Any]] = [{"params": parameters}]
        if program.groups and len(parameters) > 1:
            # By name: what fsdp_version=1 has flattened has one dimension.
            biases = {item for name, item in net.named_parameters() if name.endswith("bias")}
            weights = [item for item in parameters if item not in biases]
            others = [item for item in parameters if item in biases]
            groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": rate / 2}]
        made.append(getattr(torch.optim, program.optimizer)(groups, **options))
    return made


def make_schedules(program: Program, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """One schedule for each optimizer, or none."""
    made: dict[str, Callable[..., Any]] = {
        "StepLR": lambda item: torch.optim.lr_scheduler.StepLR(item, 2, 0.5),
        "CosineAnnealingLR": lambda item: torch.optim.lr_scheduler.CosineAnnealingLR(item, 12),
        "LambdaLR": lambda item: torch.optim.lr_scheduler.LambdaLR(item, lambda step: 1 / (1 + step)),
        "OneCycleLR": lambda item: torch.optim.lr_scheduler.OneCycleLR(item, 0.05, total_steps=40),
    }
    if program.schedule == "none" or (program.schedule == "OneCycleLR" and program.optimizer in _NO_MOMENTUM):
        return []
    return [made[program.schedule](item) for item in optimizers]


_NO_MOMENTUM = ("Adagrad", "Adadelta", "ASGD")


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sum_loss(
    logits: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """The sum of the losses of some tokens, whose number differs from sample to sample, and that number.

    Args:
        logits: (batch, tokens, VOCAB).
        labels: (batch, tokens).
        ids: The number of each token's sample, (batch, tokens).
        places: The position of each token in its sequence, (batch, tokens).
    """
    counted = places < 1 + ids % LENGTH
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * counted.flatten()).sum(), int(counted.sum())
