"""The copies of weights that DeepSpeed's optimizers step, and changes that DeepSpeed does not support.

The attributes are not documented (DeepSpeed 0.19); the engine tests compare every result with plain torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

# Attributes of DeepSpeed's optimizers, by stage: the model's weights, the optimizer's copies, and whether the
# former are the shards of all ranks.
_COPIES = (
    ("fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat", False),  # 3
    ("parallel_partitioned_bit16_groups", "single_partition_of_fp32_groups", True),  # 1 and 2
    ("bf16_partitioned_groups", "fp32_groups_flat_partition", True),  # 1 in bf16 with fp32 gradients
    ("fp16_groups_flat", "fp32_groups_flat", False),  # 0 in half precision, with DeepSpeed's own optimizers
    ("fp16_groups", "fp32_groups", False),  # 0 in half precision, with others
)

# The buffers of the model's weights, and the parameters in each, in their order there.
_BUFFERS = (
    ("bit16_groups_flat", "round_robin_bit16_groups"),  # 1 and 2
    ("bf16_groups_flat", "bf16_groups"),  # 1 in bf16 with fp32 gradients
    ("fp16_groups_flat", "fp16_groups"),  # 0 in half precision, with DeepSpeed's own optimizers
)

_ROW = 4096
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def steps_copies(engine: Any) -> bool:
    """Whether the optimizer steps copies of the weights; not at stage 0 in full precision."""
    return engine.optimizer is not engine.basic_optimizer


def sums(engine: Any) -> torch.Tensor:
    """Checksums of the weights that this process steps, to detect changes by a script.

    Computed on the weights' device: comparing with copies in CPU memory takes longer than a step.
    """
    all_sums = [item for weights, _ in _copies(engine.optimizer) for item in _sums(weights.detach())]
    return torch.cat(all_sums) if all_sums else torch.empty(0)


def _sums(weights: torch.Tensor) -> Iterator[torch.Tensor]:
    bits = weights.reshape(-1).view(_BITS[weights.element_size()])
    rows = bits[: bits.numel() // _ROW * _ROW].view(-1, _ROW)
    # Rows and columns, to detect swapped elements.
    yield from (rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), bits[rows.numel() :].long())


def copy_changes(engine: Any, checksums: torch.Tensor | None = None) -> None:
    """Copy weights that a script has changed since the last step to the optimizer's copies.

    Args:
        engine: The engine.
        checksums: The checksums of the weights in the copies; None to always compare.
    """
    optimizer = engine.optimizer
    _copy_to_buffers(optimizer)
    full = [item for item in getattr(optimizer, "persistent_parameters", ()) if item.data.numel()]
    if full:  # small ones at stage 3, which are not sharded between steps
        full[0].partition(full, has_been_updated=True)
    if checksums is not None and torch.equal(checksums, sums(engine)):
        return
    with torch.no_grad():
        for weights, copied in _copies(optimizer):
            weights = weights.detach().to(copied.device)
            if not torch.equal(copied.to(weights.dtype), weights):
                # Unchanged elements keep the precision that half precision lacks.
                is_same = copied.to(weights.dtype) == weights
                copied.copy_(torch.where(is_same, copied, weights.to(copied.dtype)))


def _copy_to_buffers(optimizer: Any) -> None:
    """Copy weights that were replaced (`parameter.data = ...`) to the flat buffers whose views they were."""
    existing = [names for names in _BUFFERS if hasattr(optimizer, names[0])]
    for name, of_members in existing[:1]:
        for number, buffer in enumerate(getattr(optimizer, name)):
            members = getattr(optimizer, of_members)[number]
            start = buffer.untyped_storage().data_ptr()
            if all(item.untyped_storage().data_ptr() == start for item in members):
                continue
            padded = getattr(optimizer, "round_robin_bit16_offsets", None)  # of stages 1 and 2
            offsets = (
                accumulate((item.numel() for item in members), initial=0)
                if padded is None
                else padded[number]
            )
            for item, offset in zip(members, offsets, strict=False):
                view = buffer.narrow(0, offset, item.numel()).view(item.shape)
                if item.untyped_storage().data_ptr() != start:
                    item.data = view.detach().copy_(item.data)


def _copies(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of model weights and optimizer copies that this process steps, except those on disk."""
    existing = [names for names in _COPIES if hasattr(optimizer, names[1])]
    for name, of_copies, are_all in existing[:1]:
        pairs = zip(getattr(optimizer, name), getattr(optimizer, of_copies), strict=True)
        for number, (weights, copied) in enumerate(pairs):
            if are_all:
                weights = weights[dist.get_rank(optimizer.real_dp_process_group[number])]
            if isinstance(copied, list):
                yield from zip(weights, copied, strict=True)
            elif weights is not None and weights is not copied and weights.numel() == copied.numel():
                yield weights, copied


class TrainedParameters:
    """The parameters that were trained when DeepSpeed created its engine; it always steps these.

    Args:
        model: The model.
        optimized: The parameters that the optimizer was created with.
    """

    def __init__(self, model: torch.nn.Module, optimized: Iterable[torch.Tensor] = ()) -> None:
        ids = {id(item) for item in optimized}
        self._parameters = {
            f"{type(model).__name__}.{name}": (item, item.requires_grad)
            for name, item in model.named_parameters()
            if id(item) in ids
        }
        self._changed: set[str] = set()  # in all backward passes of the window

    def before_pass(self, is_first: bool, loses_gradients: bool, engine: str) -> None:
        """Record which parameters are frozen or unfrozen in a backward pass.

        Args:
            is_first: Whether it is the first one of its window.
            loses_gradients: Whether gradients of previous passes are lost where a parameter is frozen.
            engine: The name of the Accelerator's engine.

        Raises:
            RuntimeError: If gradients of this window would be lost.
        """
        changed = {
            name
            for name, (parameter, was_trained) in self._parameters.items()
            if parameter.requires_grad is not was_trained
        }
        if loses_gradients and not is_first and changed - self._changed:
            raise RuntimeError(
                f"requires_grad of {min(changed - self._changed)} changed inside an accumulation window: "
                f"{engine} would lose the gradients that it has. Freeze and unfreeze parameters after "
                "optimizer.step()."
            )
        self._changed = changed if is_first else self._changed & changed

    def check_step(self, engine: str) -> None:
        """Reject a step for which DeepSpeed would have to skip parameters, or add some.

        Raises:
            RuntimeError: If parameters were frozen or unfrozen during the full window.
        """
        if self._changed:
            name = min(self._changed)
            became = "frozen" if self._parameters[name][1] else "unfrozen"
            raise RuntimeError(
                f"{name} was {became} after prepare(): {engine} steps the parameters that were trained then, "
                "all of them in one vector, so frozen ones would still be updated, and unfrozen ones would "
                "not. Save the weights, call accelerator.free_memory(), and prepare the model again with a "
                "new optimizer; give the parameters a group with lr=0 while they are frozen; or train under "
                "FSDP (version 2) or DDP."
            )
