"""One process's shard of the sequences, which replaces the full tensors during one step."""

from __future__ import annotations

from collections.abc import Collection

import torch


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
