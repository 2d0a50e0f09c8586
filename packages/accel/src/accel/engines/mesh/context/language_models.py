"""Inputs of transformers' language models that see a part of each sequence.

Such a model counts positions from 0, makes masks for what it sees, and pairs each token with its right
neighbour to compute a loss. For a part all of this is wrong, without an error; a hook before its forward
corrects it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel.engines.mesh.context.sequence_shard import SequenceShard
from accel_ops.signatures import signature

_IGNORED = -100  # as torch's cross_entropy has it by default
# transformers' names for layers that attend, and keep no state along the sequence.
_WHOLE_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


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
    """Reject models that cannot work on a part of a sequence.

    Raises:
        ValueError: If one of the model's modules cannot; the message names the alternative.
    """
    configured = [item for item in model.modules() if hasattr(text_config(item), "_attn_implementation")]
    if configured and not any(True for _ in _language_models(model)):
        raise ValueError(
            f"{type(configured[0]).__name__} takes no position_ids, so that each process would count "
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
        others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_WHOLE_LAYERS))
        if others:
            raise ValueError(
                f"{kind} has layers of the kinds {', '.join(others)}, which pass a state along the sequence; "
                "cp_size splits attention alone. Leave cp_size at 1."
            )


def complete_inputs_for(model: torch.nn.Module, part_of_now: Callable[[], SequenceShard | None]) -> None:
    """Complete the inputs of a model's language models from now on, where there is a part.

    Args:
        model: The model.
        part_of_now: Returns the part that the process works on, if any.
    """
    for module in _language_models(model):
        module.register_forward_pre_hook(functools.partial(_complete, part_of_now), with_kwargs=True)


def _complete(
    part_of_now: Callable[[], SequenceShard | None], module: torch.nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    part = part_of_now()
    if part is None:
        return None
    names = _arguments(type(module))
    # By name: which argument comes where differs between models.
    given = dict(zip(names, args, strict=False)) | kwargs
    _check_window(module, part)
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is not None:
        _check_length(module, "input_ids (or inputs_embeds)", tokens, part)
    if given.get("position_ids") is None:
        given["position_ids"] = part.positions[None]
    _check_length(module, "position_ids", given["position_ids"], part)
    if tokens is not None and "attention_mask" in names:
        given["attention_mask"] = _whole_mask(module, given.get("attention_mask"), tokens, part)
    if given.get("labels") is not None:
        given |= _shifted(module, given, part)
    return (), given


def _check_length(module: torch.nn.Module, name: str, tensor: torch.Tensor, part: SequenceShard) -> None:
    if tensor.shape[1] != len(part.positions):
        raise ValueError(
            f"{type(module).__name__} got {name} of {tensor.shape[1]} tokens inside maybe_context_parallel, "
            f"where this process has {len(part.positions)} of {part.length}. Give the tensor in buffers."
        )


def _check_window(module: torch.nn.Module, part: SequenceShard) -> None:
    config = text_config(module)
    kinds = getattr(config, "layer_types", None) or _WHOLE_LAYERS
    for name, layer in (
        ("sliding_window", "sliding_attention"),
        ("attention_chunk_size", "chunked_attention"),
    ):
        window = getattr(config, name, None)
        if window is not None and layer in kinds and window < part.length:
            raise ValueError(
                f"{type(module).__name__} attends within {name}={window}, and sequences have {part.length} "
                "tokens: the ring attends to all. Use shorter sequences, or cp_size=1."
            )


def text_config(module: torch.nn.Module) -> Any:
    """The configuration of a module's language model; None if it has none."""
    config: Any = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _whole_mask(
    module: torch.nn.Module, mask: torch.Tensor | None, tokens: torch.Tensor, part: SequenceShard
) -> torch.Tensor:
    """A mask that hides nothing, of which the model makes none; padding at the end is hidden by causality."""
    ones = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    if mask is None:
        return ones
    whole = part.whole(mask)
    if whole is None or whole.dim() != 2:
        raise ValueError(
            f"{type(module).__name__} got an attention_mask {tuple(mask.shape)} inside "
            "maybe_context_parallel that is none of the buffers, or not (batch, tokens). Give it in buffers, "
            "or leave it out."
        )
    shown = whole.bool()
    # A shown token after a hidden one: padding at the start, or inside.
    if not bool((shown[:, :-1] | ~shown[:, 1:]).all()):
        raise ValueError(
            f"{type(module).__name__} got an attention_mask with padding before tokens, and the ring has no "
            "masks. Pad at the end (padding_side='right'), or pack the sequences."
        )
    part.is_padded = part.is_padded or not bool(shown.all())
    return ones


def _shifted(module: torch.nn.Module, given: dict[str, Any], part: SequenceShard) -> dict[str, torch.Tensor]:
    """Labels shifted as a whole, and their number, of which the mean over all processes is."""
    if given.get("shift_labels") is not None:
        return {}
    whole = part.whole(given["labels"])
    # transformers' name for the loss that compares each token with the next one.
    if whole is None or getattr(module, "loss_type", None) != "ForCausalLM":
        raise ValueError(
            f"{type(module).__name__} got labels inside maybe_context_parallel that are none of the buffers, "
            f"or its loss ({getattr(module, 'loss_type', None)}) is not that of causal language models. Give "
            "labels in buffers, or compute the loss from the outputs."
        )
    shifted = torch.nn.functional.pad(whole, (0, 1), value=_IGNORED)[:, 1:]
    found = {"shift_labels": part.take(shifted, 1)}
    if given.get("num_items_in_batch") is None:
        # Each process has its own number of them: sums over the same share add up to the mean.
        found["num_items_in_batch"] = (shifted != _IGNORED).sum() / part.processes
    return found
