"""Inputs of transformers' language models under context parallelism.

Such a model counts positions from 0, makes masks for its input, and shifts labels by one token to compute the
loss. For a shard of a sequence all of this is silently wrong; a forward pre-hook corrects it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel.engines.context_parallel import SequenceShard
from accel_ops.signatures import signature

_IGNORED = -100  # as torch's cross_entropy has it by default
# transformers' names for attention layers, which keep no state along the sequence.
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


def _language_models(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost modules that take positions."""
    if "position_ids" in _arguments(type(model)):
        yield model
        return
    for child in model.children():
        yield from _language_models(child)


def _arguments(kind: type[torch.nn.Module]) -> tuple[str, ...]:
    # Without self.
    return tuple(signature(kind.forward).parameters)[1:]


def check_language_models(model: torch.nn.Module) -> None:
    """Reject models that cannot work on a shard of a sequence.

    Raises:
        ValueError: If one of the model's modules cannot; the message names the alternative.
    """
    configured = [item for item in model.modules() if hasattr(text_config(item), "_attn_implementation")]
    if configured and not any(True for _ in _language_models(model)):
        raise ValueError(
            f"{type(configured[0]).__name__} takes no position_ids, so each process would count "
            "positions from 0. Leave cp_size at 1, or use a model that takes them."
        )
    for module in configured:
        kind, config = type(module).__name__, text_config(module)
        # Private in transformers, which has no public way to read what a model was loaded with.
        if config._attn_implementation != "sdpa":
            raise ValueError(
                f"{kind} has attn_implementation={config._attn_implementation!r}, and cp_size splits what "
                "goes through scaled_dot_product_attention. Load it with attn_implementation='sdpa'."
            )
        others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_ATTENTION_LAYERS))
        if others:
            raise ValueError(
                f"{kind} has layers of the kinds {', '.join(others)}, which pass a state along the sequence; "
                "cp_size splits only attention. Leave cp_size at 1."
            )


def complete_inputs_for(model: torch.nn.Module, current_shard: Callable[[], SequenceShard | None]) -> None:
    """Complete the inputs of a model's language models from now on, where there is a shard.

    Args:
        model: The model.
        current_shard: Returns the shard that the process works on, if any.
    """
    for module in _language_models(model):
        module.register_forward_pre_hook(functools.partial(_complete, current_shard), with_kwargs=True)


def _complete(
    current_shard: Callable[[], SequenceShard | None], module: torch.nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    shard = current_shard()
    if shard is None:
        return None
    names = _arguments(type(module))
    # By name: the order of arguments differs between models.
    inputs = dict(zip(names, args, strict=False)) | kwargs
    _check_window(module, shard)
    tokens = inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    if tokens is not None:
        _check_length(module, "input_ids (or inputs_embeds)", tokens, shard)
    if inputs.get("position_ids") is None:
        inputs["position_ids"] = shard.positions[None]
    _check_length(module, "position_ids", inputs["position_ids"], shard)
    if tokens is not None and "attention_mask" in names:
        inputs["attention_mask"] = _full_mask(module, inputs.get("attention_mask"), tokens, shard)
    if inputs.get("labels") is not None:
        inputs |= _shifted(module, inputs, shard)
    return (), inputs


def _check_length(module: torch.nn.Module, name: str, tensor: torch.Tensor, shard: SequenceShard) -> None:
    if tensor.shape[1] != len(shard.positions):
        raise ValueError(
            f"{type(module).__name__} got {name} of {tensor.shape[1]} tokens inside maybe_context_parallel, "
            f"where this process has {len(shard.positions)} of {shard.length}. Give the tensor in buffers."
        )


def _check_window(module: torch.nn.Module, shard: SequenceShard) -> None:
    config = text_config(module)
    kinds = getattr(config, "layer_types", None) or _ATTENTION_LAYERS
    for name, layer in (
        ("sliding_window", "sliding_attention"),
        ("attention_chunk_size", "chunked_attention"),
    ):
        window = getattr(config, name, None)
        if window is not None and layer in kinds and window < shard.length:
            raise ValueError(
                f"{type(module).__name__} attends within {name}={window}, and sequences have {shard.length} "
                "tokens: the ring attends to all. Use shorter sequences, or cp_size=1."
            )


def text_config(module: torch.nn.Module) -> Any:
    """The configuration of a module's language model; None if it has none."""
    config: Any = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _full_mask(
    module: torch.nn.Module, mask: torch.Tensor | None, tokens: torch.Tensor, shard: SequenceShard
) -> torch.Tensor:
    """A mask of ones, so that the model makes none; causal attention hides padding at the end."""
    ones = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    if mask is None:
        return ones
    full = shard.full(mask)
    if full is None or full.dim() != 2:
        raise ValueError(
            f"{type(module).__name__} got an attention_mask {tuple(mask.shape)} inside "
            "maybe_context_parallel that is none of the buffers, or not (batch, tokens). Give it in buffers, "
            "or leave it out."
        )
    visible = full.bool()
    # A visible token after a hidden one: padding at the start, or inside.
    if not bool((visible[:, :-1] | ~visible[:, 1:]).all()):
        raise ValueError(
            f"{type(module).__name__} got an attention_mask with padding before tokens, and the ring has no "
            "masks. Pad at the end (padding_side='right'), or pack the sequences."
        )
    shard.is_padded = shard.is_padded or not bool(visible.all())
    return ones


def _shifted(
    module: torch.nn.Module, inputs: dict[str, Any], shard: SequenceShard
) -> dict[str, torch.Tensor]:
    """Labels shifted before sharding, and their number, by which the loss is divided."""
    if inputs.get("shift_labels") is not None:
        return {}
    full = shard.full(inputs["labels"])
    # transformers' name for the loss that compares each token with the next one.
    if full is None or getattr(module, "loss_type", None) != "ForCausalLM":
        raise ValueError(
            f"{type(module).__name__} got labels inside maybe_context_parallel that are none of the buffers, "
            f"or its loss ({getattr(module, 'loss_type', None)}) is not that of causal language models. Give "
            "labels in buffers, or compute the loss from the outputs."
        )
    shifted = torch.nn.functional.pad(full, (0, 1), value=_IGNORED)[:, 1:]
    labels = {"shift_labels": shard.select(shifted, 1)}
    if inputs.get("num_items_in_batch") is None:
        # Each process has another number of them: with the same divisor the sums add up to the mean.
        labels["num_items_in_batch"] = (shifted != _IGNORED).sum() / shard.processes
    return labels
