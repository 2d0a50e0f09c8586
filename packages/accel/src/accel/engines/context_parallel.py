"""Context parallelism: each process of a group works on its shard of each sequence.

Only attention mixes tokens. It runs as a ring over the group: queries stay, and the keys and values of all
processes come by, one part at a time. torch has a ring, undocumented, for the fused kernels of accelerators;
here the kernel of the CPU goes through the same two templates.

Sequences are in *balanced* parts: cut into 2n pieces over n processes, of which process r has pieces r and
2n - 1 - r, so that under causal attention all have the same work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from accel.engines import torch_private

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


class SequenceShard:
    """The shard of one step.

    Args:
        positions: The positions of this process, ascending.
        length: Tokens of the full sequences.
        buffers: The tensors to shard, and their token dimensions, by `id`.
        processes: The number of shards.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        length: int,
        buffers: dict[int, tuple[torch.Tensor, int]],
        processes: int,
    ) -> None:
        self.positions = positions
        self.length = length
        self.processes = processes
        self.is_padded = False
        """Whether tokens at the end are padding, which only later tokens would see."""
        self.awaits_backward = False
        self._buffers = buffers
        # References to the storages, which are not changed: a buffer may be a view.
        self._full = {key: buffer.detach() for key, (buffer, _) in buffers.items()}
        self._is_active = True
        self._calls = 0

    @torch.no_grad()
    def apply(self) -> None:
        """Replace the buffers by their shards."""
        for buffer, dim in self._buffers.values():
            # In place: the user's loop and the model have these tensor objects.
            buffer.set_(self.select(buffer, dim))  # type: ignore[call-overload]

    @torch.no_grad()
    def restore(self, keep: Collection[int]) -> None:
        """Restore the full sequences, except in buffers whose `id` is in `keep`."""
        self._is_active = False
        for key, (buffer, _) in self._buffers.items():
            if key not in keep:
                buffer.set_(self._full[key])  # type: ignore[call-overload]
        self._full.clear()

    def select(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This process's shard of a tensor, as a new tensor."""
        return tensor.index_select(dim, self.positions.to(tensor.device))

    def full(self, buffer: torch.Tensor) -> torch.Tensor | None:
        """The full tensor of a sharded buffer; None for other tensors."""
        return self._full.get(id(buffer))

    # What is rejected

    def check_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        is_causal: bool,
    ) -> None:
        """Reject attention that the ring cannot compute, and count calls.

        Raises:
            ValueError: If it cannot; the message names the alternative.
        """
        self._calls += 1
        if mask is not None:
            raise ValueError(
                f"attention got a mask {tuple(mask.shape)} inside maybe_context_parallel: each process has a "
                "shard of the keys, and the mask is for all. Use is_causal=True without a mask, and "
                "sequences without padding (packed, or padded at their end)."
            )
        if dropout:
            raise ValueError(
                f"attention has dropout_p={dropout} inside maybe_context_parallel: in backward the processes "
                "could not repeat what they dropped. Set the dropout of attention to 0."
            )
        # The exact type: subclasses such as nested tensors have other layouts.
        if query.dim() != 4 or type(query) is not torch.Tensor:
            raise ValueError(
                f"attention got a {type(query).__name__} {tuple(query.shape)} inside maybe_context_parallel; "
                "it takes plain tensors (batch, heads, tokens, features)."
            )
        if is_causal and query.shape[2] != key.shape[2]:
            raise ValueError(
                f"causal attention of {query.shape[2]} queries to {key.shape[2]} keys inside "
                "maybe_context_parallel: both have to be this process's shard of one sequence."
            )
        if self.is_padded and not is_causal:
            raise ValueError(
                "attention that is not causal sees the padding at the end of sequences, and context "
                "parallelism has no masks. Use sequences without padding."
            )

    def check_used(self) -> None:
        """Reject a step whose attention did not use the ring.

        Raises:
            RuntimeError: If there was none.
        """
        if not self._calls:
            raise RuntimeError(
                "no attention used the ring inside maybe_context_parallel, so each process saw "
                "only its shard of the sequence. The model has to call "
                "torch.nn.functional.scaled_dot_product_attention by this name (in transformers: "
                "attn_implementation='sdpa')."
            )

    def check_active(self) -> None:
        """Reject a backward pass after the full sequences were restored.

        Raises:
            RuntimeError: If they were.
        """
        if not self._is_active:
            raise RuntimeError(
                "the backward pass of maybe_context_parallel came after the context was left. Call "
                "accelerator.backward(loss) inside of it (and evaluate under torch.no_grad())."
            )

    def record_backward(self) -> None:
        """Record that a backward pass uses the ring.

        Raises:
            RuntimeError: If the context was left.
        """
        self.check_active()
        self.awaits_backward = False


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
