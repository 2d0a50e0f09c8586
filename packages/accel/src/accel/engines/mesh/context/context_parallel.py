"""Context parallelism: each process of a group works on its part of the same sequences.

Everything but attention treats tokens one by one; attention goes around the group as a ring.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from accel.engines.mesh.context.ring import Ring, balanced_part, ring_attention
from accel.engines.mesh.context.sequence_shard import SequenceShard

if TYPE_CHECKING:
    from collections.abc import Set

    from torch.distributed.device_mesh import DeviceMesh


class ContextParallel:
    """Shares sequences over one axis of the mesh, inside `sharing`.

    Args:
        mesh: The axis.
        rotation: How keys and values travel: "allgather" or "alltoall".
    """

    def __init__(self, mesh: DeviceMesh, rotation: str) -> None:
        self.ring = Ring(mesh, rotation)
        self.part: SequenceShard | None = None
        """The part of the sequences that this process has, inside `sharing`."""
        self._left: SequenceShard | None = None

    @contextlib.contextmanager
    def sharing(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: Set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Put this process's part in place of whole sequences, in place, for forward and backward.

        Args:
            buffers: Tensors with one entry per position along one dimension; the same on all processes of the
                group.
            dims: That dimension, for each.
            no_restore: Those of them that keep the part afterwards.

        Raises:
            ValueError: If the buffers cannot be shared; nothing is changed then.
            RuntimeError: If this is inside another such context, or no attention went around the ring.
        """
        if self.part is not None:
            raise RuntimeError("maybe_context_parallel is entered inside itself. Leave it after each step.")
        rank, size = self.ring.mesh.get_local_rank(), self.ring.mesh.size()
        whole, length = _check(buffers or [], dims or [], no_restore or set(), size)
        device = next(iter(whole.values()))[0].device
        # What an earlier step left without a backward pass is over.
        self._left = None
        self.part = part = SequenceShard(balanced_part(length, rank, size, device), length, whole, size)
        # Replaced in torch's module, where models look it up by name; other names for it are noticed by
        # `check_used`.
        attention = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = functools.partial(_attend, self.ring, part)
        try:
            part.share()
            yield
            part.check_used()
            if part.awaits_backward:
                self._left = part
        finally:
            F.scaled_dot_product_attention = attention
            part.leave({id(buffer) for buffer in no_restore or ()})
            self.part = None

    def present(self) -> SequenceShard | None:
        """The part that this process works on now."""
        return self.part

    def check_backward(self) -> None:
        """Reject a backward pass that comes too late.

        Raises:
            RuntimeError: If it belongs to a context that was left.
        """
        if self.part is None and self._left is not None:
            self._left.check_active()


def _attend(
    ring: Ring,
    part: SequenceShard,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand in for `scaled_dot_product_attention`, whose arguments these are after the first two."""
    part.check_attention(query, key, attn_mask, dropout_p, is_causal)
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        # Autocast casts for torch's own function alone, which is not called here.
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if enable_gqa and query.shape[1] != key.shape[1]:
        # The ring's templates (torch 2.13) know as many heads of keys as of queries alone.
        key, value = (item.repeat_interleave(query.shape[1] // item.shape[1], dim=1) for item in (key, value))
    if torch.is_grad_enabled() and any(item.requires_grad for item in (query, key, value)):
        part.awaits_backward = True
    ring = replace(ring, may_go_backward=part.note_backward)
    return ring_attention(ring, query, key, value, is_causal, scale)


def _check(
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    no_restore: Set[torch.Tensor],
    size: int,
) -> tuple[dict[int, tuple[torch.Tensor, int]], int]:
    """The buffers and their dimensions, each once, and the length of the sequences."""
    if not buffers or len(buffers) != len(dims):
        raise ValueError(
            f"maybe_context_parallel got {len(buffers)} buffers and {len(dims)} buffer_seq_dims: give every "
            "tensor that has one entry per token, such as buffers=[batch['input_ids'], batch['labels']], and "
            "for each its dimension of tokens, such as buffer_seq_dims=[1, 1]."
        )
    found: dict[int, tuple[torch.Tensor, int]] = {}
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(buffer, torch.Tensor) or buffer.requires_grad:
            what = "a tensor that requires grad" if isinstance(buffer, torch.Tensor) else f"{buffer!r}"
            raise ValueError(f"buffers[{number}] is {what}; buffers are tensors of data, changed in place.")
        if not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(f"buffer_seq_dims[{number}] is {dim}, and buffers[{number}] has {buffer.dim()}.")
        found[id(buffer)] = buffer, dim % buffer.dim()
    lengths = {buffer.shape[dim] for buffer, dim in found.values()}
    if len(lengths) > 1:
        raise ValueError(
            f"the buffers have sequences of {', '.join(map(str, sorted(lengths)))} tokens: one length is "
            "needed. Check buffer_seq_dims, and cut inputs and labels to the same length."
        )
    (length,) = lengths
    # Two pieces for each process, one from each end: under a causal mask late tokens have more to attend to.
    if length % (2 * size) or not length:
        raise ValueError(
            f"sequences of {length} tokens do not divide into 2 * cp_size = {2 * size} pieces, of which each "
            f"process gets two. Pad them to {max(1, -(-length // (2 * size))) * 2 * size} tokens."
        )
    if any(id(buffer) not in found for buffer in no_restore):
        raise ValueError("no_restore_buffers has a tensor that is not among buffers. Take it out, or add it.")
    return found, length
