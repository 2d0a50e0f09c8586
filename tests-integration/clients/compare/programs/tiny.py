"""Tiny models, a tokenizer and rows made on the spot, and the results that a program leaves."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 58


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0 to w57."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def make_model(layers: int = 2, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """Return a causal language model with random weights."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            num_hidden_layers=layers,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
            **sizes,
            **options,
        )
    )


def make_text(row: int, length: int) -> str:
    """Return words that differ from row to row."""
    return " ".join(f"w{(7 * row + 3 * i) % WORDS}" for i in range(length))


def numbers_of(entry: dict[str, Any]) -> dict[str, float]:
    """Return the figures of an entry of a trainer's log that do not depend on the clock."""
    clock = ("runtime", "per_second", "step_time", "flos", "clip_ratio")
    return {
        key: value
        for key, value in entry.items()
        if isinstance(value, int | float) and not any(word in key for word in clock)
    }


def log_of(trainer: Any) -> list[dict[str, float]]:
    """Return a trainer's log."""
    return [numbers_of(entry) for entry in trainer.state.log_history]


def weights_of(model: torch.nn.Module) -> float:
    """Return a figure that changes with every weight."""
    return sum(parameter.detach().double().pow(2).sum().item() for parameter in model.parameters())


def run_parts(parts: list[Callable[[Path], dict[str, Any]]]) -> None:
    """Run each part in its own folder, in the one that the command line names; write results.json."""
    out = Path(sys.argv[1])
    chosen = sys.argv[2:] or [part.__name__ for part in parts]
    results: dict[str, Any] = {}
    for part in parts:
        if part.__name__ in chosen:
            folder = out / part.__name__
            folder.mkdir(parents=True, exist_ok=True)
            results[part.__name__] = part(folder)
    if os.environ.get("RANK", "0") == "0":
        (out / "results.json").write_text(json.dumps(results, indent=1))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
