"""Ring attention: queries stay, and the keys and values of all processes come by, one part at a time.

The one place that calls torch's own ring, which is private (as torch 2.10 to 2.15 have it). torch runs it for
the fused kernels of accelerators; here the kernel of the CPU goes through the same two templates.

Sequences are in *balanced* parts: cut into 2n pieces over n processes, of which process r has pieces r and
2n - 1 - r, so that under causal attention all have the same work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ROTATIONS = {"allgather": "ALL_GATHER", "alltoall": "ALL_TO_ALL"}
"""How keys and values travel, and torch's names for it."""

_TEMPLATES = "torch.distributed.tensor.experimental._context_parallel._attention"
_SEQUENCE = 2  # of (batch, heads, sequence, features)

_aten = torch.ops.aten


@dataclass(frozen=True)
class Ring:
    """The processes that share sequences.

    Attributes:
        mesh: Their axis.
        rotation: One of `ROTATIONS`.
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
        call = {"query": query, "key": key, "value": value, "is_causal": is_causal, "scale": scale}
        with _torch_ring(ring, query.dtype, is_causal) as torch_ring:
            # torch has no function for the CPU's kernel, as it has for those of CUDA:
            # the template is called itself.
            if query.device.type == "cpu":
                out, sums, *rest = torch_ring._templated_ring_attention(
                    ring.mesh.get_group(),
                    _SEQUENCE,
                    _aten._scaled_dot_product_flash_attention_for_cpu.default,
                    dropout_p=0.0,
                    **call,
                )
            # Flash attention takes fp16 and bf16 alone.
            elif query.dtype.itemsize == 2:
                out, sums, *rest = torch_ring._scaled_dot_product_ring_flash_attention(ring.mesh, **call)
            else:
                out, sums, *rest = torch_ring._scaled_dot_product_ring_efficient_attention(ring.mesh, **call)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.ring, ctx.is_causal, ctx.scale, ctx.rest = ring, is_causal, scale, rest
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if ctx.ring.may_go_backward is not None:
            ctx.ring.may_go_backward()
        query, key, value, out, sums = ctx.saved_tensors
        mesh, rest = ctx.ring.mesh, ctx.rest
        call = {"query": query, "key": key, "value": value, "out": out, "logsumexp": sums}
        call |= {"is_causal": ctx.is_causal, "scale": ctx.scale, "dropout_p": 0.0, "grad_out": gradient}
        with _torch_ring(ctx.ring, query.dtype, ctx.is_causal) as torch_ring:
            if query.device.type == "cpu":
                found = torch_ring._templated_ring_attention_backward(
                    mesh.get_group(),
                    _SEQUENCE,
                    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
                    grad_out_name="grad_out",
                    **call,
                )
            elif query.dtype.itemsize == 2:
                names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
                call |= zip(names, rest, strict=False)  # the last of the rest is for debugging
                found = torch_ring._scaled_dot_product_ring_flash_attention_backward(mesh, **call)
            else:
                call |= {"philox_seed": rest[0], "philox_offset": rest[1], "bias": None}
                call["grad_input_mask"] = (True, True, True, False)
                found = torch_ring._scaled_dot_product_ring_efficient_attention_backward(mesh, **call)
        # Gradients of query, key and value; the other arguments are not tensors.
        return (*found[:3], None, None, None)


@contextlib.contextmanager
def _torch_ring(ring: Ring, dtype: torch.dtype, is_causal: bool) -> Iterator[Any]:
    """Give torch's module, with the options of one call.

    Without a causal mask the order of tokens does not matter to attention, and torch's ring knows balanced
    parts of causal attention alone.
    """
    try:
        module: Any = import_module(_TEMPLATES)
        options = module._cp_options
        rotation = module._RotateMethod[ROTATIONS[ring.rotation]]
        wanted = {
            "rotate_method": rotation,
            # Only a causal mask depends on the order of keys.
            "enable_load_balance": is_causal,
            # Partial results are added up in fp32, which would round float64.
            "convert_to_f32": dtype is not torch.float64,
        }
        before = {name: getattr(options, name) for name in wanted}
        # Looked up here, so that another version of torch is an error that says so.
        _ = module._templated_ring_attention, module._templated_ring_attention_backward
    except (ImportError, AttributeError, KeyError) as error:
        raise RuntimeError(
            "Context parallelism calls the ring attention of torch 2.10 to 2.15, and torch "
            f"{torch.__version__} does not have it where it was ({error}). Install one of these versions, or "
            "set cp_size=1."
        ) from error
    try:
        vars(options).update(wanted)
        yield module
    finally:
        vars(options).update(before)
