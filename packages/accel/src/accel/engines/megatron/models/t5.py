"""Encoder-decoder models under Megatron-LM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from accel.engines.megatron.models.steps import AbstractTrainStep, averaged_loss, hidden_from, next_batch


class T5TrainStep(AbstractTrainStep):
    """Batches and losses of T5 models.

    A batch as for transformers has "input_ids", "attention_mask" and "labels" (-100: not counted), which
    the decoder gets shifted by one. A batch of Megatron's datasets has "text_enc", "text_dec", "labels",
    "loss_mask" and the masks "enc_mask", "dec_mask" and "enc_dec_mask".

    Args:
        accelerator: The Accelerator, with its MegatronLMPlugin.
        args: Settings by Megatron-LM's names, as attributes.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("T5TrainStep")
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the mask of padding in a batch.

        Args:
            attention_mask: 1 for real tokens, shape (batch, length).

        Returns:
            True for masked positions, shape (batch, length, length).
        """
        return hidden_from(attention_mask, attention_mask)

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device | str) -> torch.Tensor:
        """Return the causal mask of the decoder.

        Args:
            seq_length: The decoder's tokens per sequence.
            device: Device of the mask.

        Returns:
            True for masked positions, shape (1, length, length).
        """
        return torch.ones(1, seq_length, seq_length, dtype=torch.bool, device=device).triu(1)

    @staticmethod
    def get_enc_dec_mask(
        attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device | str
    ) -> torch.Tensor:
        """Return the mask of the encoder's padding for the decoder's tokens.

        Args:
            attention_mask: 1 for real tokens of the encoder, shape (batch, encoder's length).
            dec_seq_length: The decoder's tokens per sequence.
            device: Device of the mask.

        Returns:
            True for masked positions, shape (batch, decoder's length, encoder's length).
        """
        kept = attention_mask.to(device)
        queries = torch.ones(kept.shape[0], dec_seq_length, dtype=kept.dtype, device=device)
        return hidden_from(queries, kept)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that makes a model's inputs from a micro-batch.

        Args:
            accelerator: The Accelerator; its plugin's `custom_get_batch_function` takes precedence.
            megatron_dataset_flag: Whether batches are those of Megatron's datasets.
        """
        custom = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        return custom or (_of_megatron if megatron_dataset_flag else self._of_transformers)

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return the function that averages the losses of tokens.

        Args:
            accelerator: The Accelerator; its plugin's `custom_loss_function` takes precedence.
        """
        plugin = accelerator.state.megatron_lm_plugin
        per_token = bool(plugin.calculate_per_token_loss)

        def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> tuple[Any, ...]:
            return averaged_loss(output_tensor, loss_mask, per_token)

        return plugin.custom_loss_function or loss_func

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function that runs a model on a micro-batch."""

        def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
            inputs, targets, loss_mask, labels, *masks = self.get_batch(data_iterator)
            # One more dimension: the same mask for all heads.
            output = model(inputs, targets, *(mask[:, None] for mask in masks), lm_labels=labels)
            return output, functools.partial(self.loss_func, loss_mask)

        return forward_step

    def _of_transformers(self, data_iterator: Any) -> tuple[torch.Tensor, ...]:
        batch = next_batch(data_iterator)
        tokens, targets = batch["input_ids"], batch["labels"]
        kept = batch.get("attention_mask", torch.ones_like(tokens))
        # -100 is transformers' mark for tokens without a loss.
        loss_mask = targets != -100
        # Any valid token will do, as the mask drops its loss.
        labels = targets.masked_fill(~loss_mask, 0)
        targets = torch.roll(labels, 1, dims=1)
        targets[:, 0] = 0  # T5's start token is its padding token
        length = targets.shape[1]
        masks = (
            self.attn_mask_postprocess(kept),
            self.get_decoder_mask(length, tokens.device),
            self.get_enc_dec_mask(kept, length, tokens.device),
        )
        return tokens, targets, loss_mask.float(), labels, *masks


def _of_megatron(data_iterator: Any) -> tuple[torch.Tensor, ...]:
    batch = next_batch(data_iterator)
    ids = (batch["text_enc"].long(), batch["text_dec"].long())
    # In Megatron's datasets 1 means visible, but its models take True for masked.
    masks = (batch[name] < 0.5 for name in ("enc_mask", "dec_mask", "enc_dec_mask"))
    return *ids, batch["loss_mask"].float(), batch["labels"].long(), *masks
