"""Batches, forward steps and losses of each kind of model that Megatron-LM trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accel.engines.megatron.runtime import core, parallel_state


class StepOutput(NamedTuple):
    """The output of a model under Megatron-LM.

    Attributes:
        loss: The mean over micro-batches and data-parallel processes, a tensor without dimensions, the same
            on all processes.
        logits: On the last pipeline stage with `return_logits`, else None.
    """

    loss: torch.Tensor
    logits: torch.Tensor | None = None


class AbstractTrainStep(ABC):
    """A kind of model's batch, forward pass and loss, as megatron-core's schedules call them.

    Args:
        name: The kind's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function that takes an iterator of micro-batches and returns a model's inputs."""

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return a function `(data_iterator, model)` that returns outputs and their loss function.

        That function takes the outputs and returns the loss and a dictionary of reported values: "loss" is
        the loss of the step, and "logits", if any, are returned with the output.
        """

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return the function that computes the loss from outputs."""


def next_batch(data_iterator: Iterator[Mapping[str, Any]] | None) -> dict[str, torch.Tensor]:
    """Take a micro-batch, of which each rank of a context-parallel group keeps its shard.

    Args:
        data_iterator: The micro-batches.
    """
    assert data_iterator is not None, "every process has the batch"
    batch = dict(next(data_iterator))
    if parallel_state().get_context_parallel_world_size() > 1:
        batch = core("utils").get_batch_on_this_cp_rank(batch)
    return batch


def causal_mask(length: int, device: torch.device, keep: torch.Tensor | None = None) -> torch.Tensor:
    """Return the attention mask of a causal model.

    Args:
        length: Tokens per sequence.
        device: Device of the mask.
        keep: 1 for tokens to attend to, shape (batch, length).

    Returns:
        True for masked positions, shape (1 or batch, 1, length, length).
    """
    # True means masked, unlike in transformers.
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
    return hidden if keep is None else hidden | hidden_from(keep, keep)[:, None]


def hidden_from(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the mask of keys that each query does not attend to.

    Args:
        queries: 1 for real tokens, shape (batch, queries).
        keys: The same, shape (batch, keys).

    Returns:
        True for masked positions, shape (batch, queries, keys).
    """
    # Products of zeros and ones of any dtype.
    return queries[:, :, None] * keys[:, None, :] < 0.5


def averaged_loss(losses: torch.Tensor, loss_mask: torch.Tensor, per_token: bool) -> tuple[Any, ...]:
    """The mean loss over the tokens that count, in the form that megatron-core's schedules take.

    Args:
        losses: Of each token, on this process of a context-parallel group.
        loss_mask: 1 for tokens that count; the same shape.
        per_token: Whether the schedule itself averages over the tokens of all micro-batches.

    Returns:
        The loss; with `per_token` its sum and the number of tokens. Then a dictionary of reported values.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.float().reshape(-1) * mask)
    count = mask.sum()
    # Both in one collective.
    reported = torch.stack([total.detach(), count])
    state = parallel_state()
    if state.get_context_parallel_world_size() > 1:
        dist.all_reduce(reported, group=state.get_context_parallel_group())
    # Without any token that counts, the loss is 0.
    mean = reported[0] / reported[1].clamp(min=1)
    report = {"loss": avg_losses_across_data_parallel_group([mean])[0]}
    if per_token:
        # The sum and the number: megatron-core divides by the tokens of the full step.
        return total, count.int(), report
    return total / reported[1].clamp(min=1), report


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Average losses over the data-parallel processes, which all call it.

    Args:
        losses: Tensors of one element each.

    Returns:
        One tensor with the averages, without gradients.
    """
    group = parallel_state().get_data_parallel_group()
    # Copies, as they are divided in place below.
    averaged = torch.stack([loss.detach().reshape(()).clone() for loss in losses])
    dist.all_reduce(averaged, group=group)
    # gloo has no averaging.
    averaged /= group.size()
    return averaged
