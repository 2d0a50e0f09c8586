"""Context parallelism: each process of a group works on its shard of the same sequences.

Only attention mixes tokens; it runs as a ring over the group.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from accel.engines.mesh.context.ring import Ring, balanced_positions, ring_attention
from accel.engines.mesh.context.sequence_shard import SequenceShard

if TYPE_CHECKING:
    from collections.abc import Set

    from torch.distributed.device_mesh import DeviceMesh


class ContextParallel:
    """Shards sequences over one axis of the mesh, inside the context `shard`.

    Args:
        mesh: The axis.
        rotation: How keys and values are exchanged: "allgather" or "alltoall".
    """

    def __init__(self, mesh: DeviceMesh, rotation: str) -> None:
        self.ring = Ring(mesh, rotation)
        self.current_shard: SequenceShard | None = None
        """This process's shard of the sequences, inside `shard`."""
        self._left: SequenceShard | None = None

    @contextlib.contextmanager
    def shard(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: Set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Replace full sequences by this process's shard, in place, for forward and backward.

        Args:
            buffers: Tensors with one entry per position along one dimension; the same on all processes of the
                group.
            dims: That dimension of each.
            no_restore: Buffers that keep the shard afterwards.

        Raises:
            ValueError: If the buffers cannot be sharded; nothing is changed then.
            RuntimeError: If this is inside another such context, or no attention used the ring.
        """
        if self.current_shard is not None:
            raise RuntimeError("maybe_context_parallel is entered inside itself. Leave it after each step.")
        rank, size = self.ring.mesh.get_local_rank(), self.ring.mesh.size()
        buffers_by_id, length = _check(buffers or [], dims or [], no_restore or set(), size)
        device = next(iter(buffers_by_id.values()))[0].device
        # A previous step without a backward pass does not matter any more.
        self._left = None
        self.current_shard = shard = SequenceShard(
            balanced_positions(length, rank, size, device), length, buffers_by_id, size
        )
        # Replaced in torch's module, where models look it up by name; `check_used` detects models that have
        # imported it under another name.
        attention = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = functools.partial(_attend, self.ring, shard)
        try:
            shard.apply()
            yield
            shard.check_used()
            if shard.awaits_backward:
                self._left = shard
        finally:
            F.scaled_dot_product_attention = attention
            shard.restore({id(buffer) for buffer in no_restore or ()})
            self.current_shard = None

    def current(self) -> SequenceShard | None:
        """The shard that this process works on now."""
        return self.current_shard

    def check_backward(self) -> None:
        """Reject a backward pass after its context was left.

        Raises:
            RuntimeError: If it belongs to a context that was left.
        """
        if self.current_shard is None and self._left is not None:
            self._left.check_active()


def _attend(
    ring: Ring,
    shard: SequenceShard,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Replaces `scaled_dot_product_attention`, whose arguments these are after the first two."""
    shard.check_attention(query, key, attn_mask, dropout_p, is_causal)
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        # Autocast casts only for torch's own function, which is not called here.
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if enable_gqa and query.shape[1] != key.shape[1]:
        # The ring's templates (torch 2.13) need as many key heads as query heads.
        key, value = (item.repeat_interleave(query.shape[1] // item.shape[1], dim=1) for item in (key, value))
    if torch.is_grad_enabled() and any(item.requires_grad for item in (query, key, value)):
        shard.awaits_backward = True
    ring = replace(ring, may_go_backward=shard.record_backward)
    return ring_attention(ring, query, key, value, is_causal, scale)


def _check(
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    no_restore: Set[torch.Tensor],
    size: int,
) -> tuple[dict[int, tuple[torch.Tensor, int]], int]:
    """Return the buffers with their dimensions, by `id`, and the length of the sequences."""
    if not buffers or len(buffers) != len(dims):
        raise ValueError(
            f"maybe_context_parallel got {len(buffers)} buffers and {len(dims)} buffer_seq_dims: give every "
            "tensor that has one entry per token, such as buffers=[batch['input_ids'], batch['labels']], and "
            "for each its dimension of tokens, such as buffer_seq_dims=[1, 1]."
        )
    checked: dict[int, tuple[torch.Tensor, int]] = {}
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(buffer, torch.Tensor) or buffer.requires_grad:
            what = "a tensor that requires grad" if isinstance(buffer, torch.Tensor) else f"{buffer!r}"
            raise ValueError(f"buffers[{number}] is {what}; buffers are tensors of data, changed in place.")
        if not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(f"buffer_seq_dims[{number}] is {dim}, and buffers[{number}] has {buffer.dim()}.")
        checked[id(buffer)] = buffer, dim % buffer.dim()
    lengths = {buffer.shape[dim] for buffer, dim in checked.values()}
    if len(lengths) > 1:
        raise ValueError(
            f"the buffers have sequences of {', '.join(map(str, sorted(lengths)))} tokens: one length is "
            "needed. Check buffer_seq_dims, and cut inputs and labels to the same length."
        )
    (length,) = lengths
    # Two chunks per process, one from each end: under a causal mask late tokens have more work.
    if length % (2 * size) or not length:
        raise ValueError(
            f"sequences of {length} tokens do not divide into 2 * cp_size = {2 * size} chunks, of which each "
            f"process gets two. Pad them to {max(1, -(-length // (2 * size))) * 2 * size} tokens."
        )
    if any(id(buffer) not in checked for buffer in no_restore):
        raise ValueError("no_restore_buffers has a tensor that is not among buffers. Take it out, or add it.")
    return checked, length
