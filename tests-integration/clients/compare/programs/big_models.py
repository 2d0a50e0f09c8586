"""transformers' models loaded with a device map, over memory and disk: generation, figures, saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import compute_module_sizes, get_balanced_memory
from transformers import AutoConfig, AutoModelForCausalLM, pipeline

GIVEN = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"} | {
    f"model.layers.{number}": ("cpu", "disk")[number % 2] for number in range(4)
}
IDS = torch.arange(16).reshape(2, 8) + 3


@torch.no_grad()
def answers_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return what a model computes, generates, and where its weights are."""
    options = {"max_new_tokens": 5, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}
    torch.manual_seed(1)
    return {
        "logits": model(IDS).logits.double().abs().sum().item(),
        "greedy": model.generate(IDS, do_sample=False, **options).tolist(),
        "sampled": model.generate(IDS, do_sample=True, **options).tolist(),
        "beams": model.generate(IDS, do_sample=False, num_beams=2, **options).tolist(),
        "meta": sorted(
            name for name, value in model.named_parameters(remove_duplicate=False) if value.is_meta
        ),
        "map": {key: str(value) for key, value in sorted(getattr(model, "hf_device_map", {}).items())},
    }


def save(folder: Path, **options: Any) -> str:
    """Save a model in several files; returns the folder."""
    tiny.make_model(layers=4, **options).save_pretrained(folder / "model", max_shard_size="20KB")
    return str(folder / "model")


def load(folder: Path) -> dict[str, Any]:
    """Load with device maps of each kind; a model that is partly on the disk is saved again."""
    path = save(folder)
    answers = {}
    cases: dict[str, dict[str, Any]] = {
        "auto": {},
        "room for a part": {"max_memory": {"cpu": "25KB"}},
        "room for a part in bf16": {"max_memory": {"cpu": "12KB"}, "dtype": torch.bfloat16},
        "sequential": {"device_map": "sequential", "max_memory": {"cpu": "40KB"}},
        "given": {"device_map": GIVEN},
        "cpu": {"device_map": "cpu"},
    }
    for name, options in cases.items():
        model = AutoModelForCausalLM.from_pretrained(
            path, **{"device_map": "auto", "offload_folder": folder / f"offloaded {name}", **options}
        ).eval()
        answers[name] = answers_of(model)
        if name == "room for a part":
            model.save_pretrained(folder / "again")
            saved = AutoModelForCausalLM.from_pretrained(folder / "again")
            answers["saved again"] = {"weights": tiny.weights_of(saved)}
    return answers


def tie(folder: Path) -> dict[str, Any]:
    """Load a model whose first and last layer share their weights."""
    path = save(folder, tie_word_embeddings=True)
    answers = {}
    for size in ("12KB", "30KB"):
        model = AutoModelForCausalLM.from_pretrained(
            path, device_map="auto", max_memory={"cpu": size}, offload_folder=folder / f"offloaded {size}"
        ).eval()
        answers[size] = answers_of(model)
    return answers


def dispatch(folder: Path) -> dict[str, Any]:
    """Place a model by accelerate's own functions."""
    path = save(folder)
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    blocks = ["LlamaDecoderLayer"]
    memory = get_balanced_memory(empty, {"cpu": 40_000}, no_split_module_classes=blocks)
    inferred = infer_auto_device_map(
        empty, {"cpu": 30_000}, no_split_module_classes=blocks, offload_buffers=True
    )
    answers: dict[str, Any] = {
        "memory": {str(key): value for key, value in memory.items()},
        "inferred": {key: str(value) for key, value in inferred.items()},
        "sizes": dict(compute_module_sizes(empty)),
    }
    loaded = load_checkpoint_and_dispatch(
        empty.eval(),
        path,
        device_map=inferred,
        no_split_module_classes=blocks,
        offload_folder=folder / "checkpoint",
    )
    answers["checkpoint"] = answers_of(loaded)
    placed = dispatch_model(
        AutoModelForCausalLM.from_pretrained(path).eval(), inferred, offload_dir=folder / "dispatched"
    )
    answers["dispatched"] = answers_of(placed)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    cpu_offload(model, torch.device("cpu"))
    answers["offloaded"] = answers_of(model)
    remove_hook_from_module(model, recurse=True)
    answers["brought back"] = answers_of(model)
    disk_offload(model, folder / "disk", torch.device("cpu"))
    answers["on the disk"] = answers_of(model)
    text = pipeline("text-generation", model=placed, tokenizer=tiny.make_tokenizer())
    answers["text"] = text("w1 w2 w3", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    return answers


if __name__ == "__main__":
    tiny.run_parts([load, tie, dispatch])
