"""The copies of the weights that a DeepSpeed engine's optimizer steps, and what it cannot follow.

Which attributes hold them is no documented interface (0.19); the engine tests compare every result with plain
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

# Attributes of DeepSpeed's optimizers, by stage: the weights as the model has them, the optimizer's copies,
# and whether the first are the parts of all processes.
_COPIES = (
    ("fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat", False),  # 3
    ("parallel_partitioned_bit16_groups", "single_partition_of_fp32_groups", True),  # 1 and 2
    ("bf16_partitioned_groups", "fp32_groups_flat_partition", True),  # 1 in bf16 with fp32 gradients
    ("fp16_groups_flat", "fp32_groups_flat", False),  # 0 in half precision, with DeepSpeed's own optimizers
    ("fp16_groups", "fp32_groups", False),  # 0 in half precision, with others
)

_ROW = 4096
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def steps_copies(engine: Any) -> bool:
    """Whether the optimizer steps copies of the weights: at stage 0 in full precision it does not."""
    return engine.optimizer is not engine.basic_optimizer


def sums(engine: Any) -> torch.Tensor:
    """Sums over the bits of the weights that this process steps, which show whether a script changes them.

    They are made on the weights' device: comparing with copies in the CPU's memory takes longer than a step.
    """
    found = [item for weights, _ in _copies(engine.optimizer) for item in _sums(weights.detach())]
    return torch.cat(found) if found else torch.empty(0)


def _sums(weights: torch.Tensor) -> Iterator[torch.Tensor]:
    bits = weights.reshape(-1).view(_BITS[weights.element_size()])
    rows = bits[: bits.numel() // _ROW * _ROW].view(-1, _ROW)
    # Both ways, so that elements that are exchanged show.
    yield from (rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), bits[rows.numel() :].long())


def take_changes(engine: Any, known: torch.Tensor | None = None) -> None:
    """Give the optimizer's copies the weights that a script has changed since the last step.

    Args:
        engine: The engine.
        known: The sums of weights that the copies have; None to compare in any case.
    """
    optimizer = engine.optimizer
    whole = [item for item in getattr(optimizer, "persistent_parameters", ()) if item.data.numel()]
    if whole:  # small ones at stage 3, which stay whole between steps
        whole[0].partition(whole, has_been_updated=True)
    if known is not None and torch.equal(known, sums(engine)):
        return
    with torch.no_grad():
        for weights, copied in _copies(optimizer):
            weights = weights.detach().to(copied.device)
            if not torch.equal(copied.to(weights.dtype), weights):
                # The others keep the digits that half precision drops.
                is_same = copied.to(weights.dtype) == weights
                copied.copy_(torch.where(is_same, copied, weights.to(copied.dtype)))


def _copies(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What this process steps, as the model has it and as the optimizer does, but for what is on a disk."""
    found = [names for names in _COPIES if hasattr(optimizer, names[1])]
    for name, of_copies, are_all in found[:1]:
        pairs = zip(getattr(optimizer, name), getattr(optimizer, of_copies), strict=True)
        for number, (weights, copied) in enumerate(pairs):
            if are_all:
                weights = weights[dist.get_rank(optimizer.real_dp_process_group[number])]
            if isinstance(copied, list):
                yield from zip(weights, copied, strict=True)
            elif weights is not None and weights is not copied and weights.numel() == copied.numel():
                yield weights, copied


class TrainedParameters:
    """Which parameters were trained when DeepSpeed made its engine; it steps those from then on.

    Args:
        model: The model.
        given: The parameters that the optimizer was made from.
    """

    def __init__(self, model: torch.nn.Module, given: Iterable[torch.Tensor] = ()) -> None:
        held = {id(item) for item in given}
        self._parameters = {
            f"{type(model).__name__}.{name}": (item, item.requires_grad)
            for name, item in model.named_parameters()
            if id(item) in held
        }
        self._changed: set[str] = set()  # in all backward passes of the window

    def before_pass(self, is_first: bool, loses_gradients: bool, engine: str) -> None:
        """Note what is frozen or unfrozen in a backward pass.

        Args:
            is_first: Whether it is the first one of its window.
            loses_gradients: Whether gradients of earlier passes are lost where a parameter is frozen.
            engine: What the Accelerator's engine is called.

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
        """Reject a step of which DeepSpeed cannot leave parameters out, or take others in.

        Raises:
            RuntimeError: If parameters were frozen or unfrozen in the whole window.
        """
        if self._changed:
            name = min(self._changed)
            became = "frozen" if self._parameters[name][1] else "unfrozen"
            raise RuntimeError(
                f"{name} was {became} after prepare(): {engine} steps the parameters that were trained then, "
                "all of them in one vector, so that frozen ones would go on moving, and unfrozen ones would "
                "rest. Save the weights, call accelerator.free_memory(), and prepare the model again with a "
                "new optimizer; give the parameters a group with lr=0 while they rest; or train under FSDP "
                "(version 2) or DDP."
            )
