"""BERT under Megatron-LM: pretraining, and classification with a user's model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from accel.engines.megatron.models.steps import (
    AbstractTrainStep,
    averaged_loss,
    avg_losses_across_data_parallel_group,
    next_batch,
)


class BertTrainStep(AbstractTrainStep):
    """Batches and losses of BERT models.

    A batch as for transformers has "input_ids", "attention_mask", "token_type_ids", "labels" (-100: not
    masked) and "next_sentence_label". A batch of Megatron's datasets has "text", "padding_mask", "types",
    "labels", "loss_mask" and "is_random".

    Args:
        accelerator: The Accelerator, with its MegatronLMPlugin.
        args: Settings by Megatron-LM's names, as attributes.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("BertTrainStep")
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator, args.pretraining_flag, args.num_labels)
        self.forward_step = self.get_forward_step_func(args.pretraining_flag, args.bert_binary_head)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that makes a model's inputs from a micro-batch.

        Args:
            accelerator: The Accelerator; its plugin's `custom_get_batch_function` takes precedence.
            megatron_dataset_flag: Whether batches are those of Megatron's datasets.
        """
        custom = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        return custom or (_of_megatron if megatron_dataset_flag else _of_transformers)

    def get_loss_func(  # type: ignore[override]  # as documented
        self, accelerator: Any, pretraining_flag: bool, num_labels: int
    ) -> Callable[..., Any]:
        """Return the function that computes the loss from a model's output.

        Args:
            accelerator: The Accelerator; its plugin's `custom_loss_function` takes precedence.
            pretraining_flag: Whether masked tokens (and the order of sentences) are learned.
            num_labels: Number of classes; 1 for regression.
        """
        plugin = accelerator.state.megatron_lm_plugin
        if plugin.custom_loss_function is not None:
            custom: Callable[..., Any] = plugin.custom_loss_function
            return custom
        if pretraining_flag:
            return functools.partial(_pretraining_loss, bool(plugin.calculate_per_token_loss))
        return functools.partial(_classification_loss, num_labels)

    def get_forward_step_func(  # type: ignore[override]  # as documented
        self, pretraining_flag: bool, bert_binary_head: bool
    ) -> Callable[..., Any]:
        """Return the function that runs a model on a micro-batch.

        Args:
            pretraining_flag: As in `get_loss_func`.
            bert_binary_head: Whether the order of sentences is learned too.
        """

        def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, types, order, loss_mask, labels, mask = self.get_batch(data_iterator)
            if not pretraining_flag:
                output = model(tokens, mask, tokentype_ids=types)
                return output, functools.partial(self.loss_func, labels)
            segment_types = types if bert_binary_head else None
            output = model(tokens, mask, tokentype_ids=segment_types, lm_labels=labels)
            return output, functools.partial(self.loss_func, loss_mask, order if bert_binary_head else None)

        return forward_step


def _pretraining_loss(
    per_token: bool, loss_mask: torch.Tensor, sentence_order: torch.Tensor | None, output_tensor: Any
) -> tuple[Any, ...]:
    losses, order_logits = output_tensor
    if sentence_order is None or order_logits is None:
        return averaged_loss(losses, loss_mask, per_token)
    # Two classes: the second text follows the first, or is a random one.
    order = F.cross_entropy(order_logits.reshape(-1, 2).float(), sentence_order.reshape(-1))
    *masked, report = averaged_loss(losses, loss_mask, per_token)
    report = {"loss": report["loss"] + avg_losses_across_data_parallel_group([order])[0]}
    if per_token:
        total, count = masked
        # Times the number of tokens, by which megatron-core divides.
        return total + order * count, count, report
    return masked[0] + order, report


def _classification_loss(num_labels: int, labels: torch.Tensor, output_tensor: Any) -> tuple[Any, ...]:
    logits = output_tensor.float()
    # One label means regression, as in transformers.
    if num_labels == 1:
        loss = F.mse_loss(logits.reshape(-1), labels.reshape(-1).float())
    else:
        loss = F.cross_entropy(logits.reshape(-1, num_labels), labels.reshape(-1))
    return loss, {"loss": avg_losses_across_data_parallel_group([loss])[0], "logits": logits.detach()}


def _of_megatron(data_iterator: Any) -> tuple[Any, ...]:
    batch = next_batch(data_iterator)
    names = ("text", "types", "is_random", "loss_mask", "labels", "padding_mask")
    tokens, types, order, loss_mask, labels, mask = (batch[name] for name in names)
    return tokens.long(), types.long(), order.long(), loss_mask.float(), labels.long(), mask.long()


def _of_transformers(data_iterator: Any) -> tuple[Any, ...]:
    batch = next_batch(data_iterator)
    tokens, labels = batch["input_ids"], batch["labels"]
    types = batch.get("token_type_ids", torch.zeros_like(tokens))
    mask = batch.get("attention_mask", torch.ones_like(tokens))
    if labels.shape != tokens.shape:  # labels of classes, not of tokens
        return tokens, types, None, None, labels, mask
    loss_mask = labels != -100
    order = batch.get("next_sentence_label")
    return tokens, types, order, loss_mask.float(), labels.masked_fill(~loss_mask, 0), mask
