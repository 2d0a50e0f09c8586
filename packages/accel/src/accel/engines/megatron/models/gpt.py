"""Causal language models under Megatron-LM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from accel.engines.megatron.models.steps import AbstractTrainStep, averaged_loss, causal_mask, next_batch
from accel.engines.megatron.runtime import core


class GPTTrainStep(AbstractTrainStep):
    """Batches and losses of GPT models.

    A batch as for transformers has "input_ids" and, optionally, "labels" (-100: not counted; they are shifted
    here) and "attention_mask". A batch of Megatron's datasets has "tokens",
    "labels", "loss_mask" and "position_ids".

    Args:
        accelerator: The Accelerator, with its MegatronLMPlugin.
        args: Settings by Megatron-LM's names, as attributes.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("GPTTrainStep")
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        self.return_logits = accelerator.state.megatron_lm_plugin.return_logits

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that makes a model's inputs from a micro-batch.

        Args:
            accelerator: The Accelerator; its plugin's `custom_get_batch_function` takes precedence.
            megatron_dataset_flag: Whether batches are those of Megatron's datasets.
        """
        custom = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        return custom or (_of_megatron if megatron_dataset_flag else _of_transformers)

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return the function that averages the losses of tokens.

        Args:
            accelerator: The Accelerator; its plugin's `custom_loss_function` takes precedence.
        """
        plugin = accelerator.state.megatron_lm_plugin
        if plugin.custom_loss_function is not None:
            custom: Callable[..., Any] = plugin.custom_loss_function
            return custom
        per_token = bool(plugin.calculate_per_token_loss)

        def loss_func(loss_mask: torch.Tensor, output_tensor: Any) -> tuple[Any, ...]:
            if not isinstance(output_tensor, tuple):
                return averaged_loss(output_tensor, loss_mask, per_token)
            losses, logits = output_tensor
            *found, report = averaged_loss(losses, loss_mask, per_token)
            return (*found, {**report, "logits": logits})

        return loss_func

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function that runs a model on a micro-batch."""

        def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            if not self.return_logits:
                losses = model(tokens, position_ids, attention_mask, labels=labels)
                return losses, functools.partial(self.loss_func, loss_mask)
            output = model(tokens, position_ids, attention_mask)
            return output, functools.partial(self._loss_of_logits, labels, loss_mask)

        return forward_step

    def _loss_of_logits(self, labels: torch.Tensor, loss_mask: torch.Tensor, logits: torch.Tensor) -> Any:
        parallel = core("tensor_parallel")
        # Cross-entropy changes its input in place.
        losses = parallel.vocab_parallel_cross_entropy(logits.float().clone(), labels)
        all_logits = parallel.gather_from_tensor_model_parallel_region(logits.detach())
        return self.loss_func(loss_mask, (losses, all_logits))


def _of_megatron(data_iterator: Any) -> tuple[torch.Tensor, ...]:
    batch = next_batch(data_iterator)
    tokens = batch["tokens"]
    mask = batch.get("attention_mask")
    if mask is None:
        mask = causal_mask(tokens.shape[1], tokens.device)
    return tokens, batch["labels"], batch["loss_mask"], mask, batch["position_ids"]


def _of_transformers(data_iterator: Any) -> tuple[torch.Tensor, ...]:
    batch = next_batch(data_iterator)
    tokens = batch["input_ids"]
    kept = batch.get("attention_mask")
    targets = batch.get("labels", tokens if kept is None else tokens.masked_fill(kept == 0, -100))
    labels = torch.roll(targets, -1, dims=1)
    loss_mask = labels != -100
    loss_mask[:, -1] = False  # nothing comes after the last token
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    mask = causal_mask(tokens.shape[1], tokens.device, kept)
    return tokens, labels.masked_fill(labels == -100, 0), loss_mask.float(), mask, positions
