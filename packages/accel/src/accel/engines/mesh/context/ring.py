"""Ring attention: queries stay, and the keys and values of all processes come by, one part at a time.

It is torch's own ring, which torch does not document: see `accel.engines.torch_private`.

Sequences are in *balanced* parts: cut into 2n pieces over n processes, of which process r has pieces r and
2n - 1 - r, so that under causal attention all have the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel.engines import torch_private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Ring:
    """The processes that share sequences.

    Attributes:
        mesh: Their axis.
        rotation: How keys and values travel, "allgather" or "alltoall".
        may_go_backward: Called before backward communicates, if given; raises where it may not.
    """

    mesh: DeviceMesh
    rotation: str
    may_go_backward: Callable[[], None] | None = None


def balanced_positions(length: int, rank: int, size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The positions of a sequence that one process has.

    Args:
        length: Tokens of the full sequence, a multiple of `2 * size`.
        rank: Which process.
        size: How many of them.
        device: Where the result is.

    Returns:
        Positions (length / size,), ascending.
    """
    piece = length // (2 * size)
    starts = (rank * piece, (2 * size - 1 - rank) * piece)
    return torch.cat([torch.arange(start, start + piece, device=device) for start in starts])


def ring_attention(
    ring: Ring,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend to the full sequence, of which each process has its balanced shard.

    Args:
        ring: The processes; all of them call it.
        query: This process's (batch, heads, part, features).
        key: The same of the keys.
        value: The same of the values.
        is_causal: Whether tokens attend to themselves and earlier ones alone.
        scale: Factor of the scores; by default 1 / sqrt(features).

    Returns:
        What attention over the full sequence gives for this process's queries.

    Raises:
        RuntimeError: If this version of torch has no ring where it is looked for.
    """
    attend: Callable[..., torch.Tensor] = _RingAttention.apply
    return attend(query, key, value, ring, is_causal, scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ring: Ring,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        out, sums, rest = torch_private.ring_attention(
            ring.mesh, ring.rotation, query, key, value, is_causal, scale
        )
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.ring, ctx.is_causal, ctx.scale, ctx.rest = ring, is_causal, scale, rest
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if ctx.ring.may_go_backward is not None:
            ctx.ring.may_go_backward()
        names = ("query", "key", "value", "out", "logsumexp")
        call: dict[str, Any] = dict(zip(names, ctx.saved_tensors, strict=True))
        call |= {"is_causal": ctx.is_causal, "scale": ctx.scale}
        gradients = torch_private.ring_attention_backward(
            ctx.ring.mesh, ctx.ring.rotation, gradient, ctx.rest, call
        )
        # Gradients of query, key and value; the other arguments are not tensors.
        return (*gradients, None, None, None)
