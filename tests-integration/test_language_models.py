"""Models of transformers as scripts call them, with their weights or their sequences split."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from accel.accelerator import Accelerator
from accel.utils import broadcast_object_list, get_model_tp_size
from accel_state.parallelism.config import ParallelismConfig
from accel_world.engine_cases import CASES

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


def make(kind: str, **options: Any) -> torch.nn.Module:
    """A small model: Llama, or Qwen3, whose heads have their own norms and whose embedding is tied."""
    with warnings.catch_warnings():  # of the libraries that it imports, about themselves
        warnings.simplefilter("ignore")
        import transformers

        model_class = getattr(transformers, f"{kind}ForCausalLM")
    config = model_class.config_class(**SMALL, tie_word_embeddings=kind == "Qwen3", **options)
    torch.manual_seed(0)
    return model_class(config)


def make_batch() -> dict[str, torch.Tensor]:
    """Two sequences; one is padded at its end, one has tokens that do not count."""
    words = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": words, "labels": words.clone(), "attention_mask": torch.ones_like(words)}
    batch["attention_mask"][1, 12:] = 0
    batch["labels"][1, 12:] = batch["labels"][0, :3] = -100
    return batch


def step(kind: str, **sizes: int) -> tuple[float, float, dict[str, float]]:
    """The loss, the gradients' norm, and by how much gradients differ from those of one process."""
    plain, batch = make(kind), make_batch()
    expected = plain(**batch).loss
    expected.backward()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    model = accelerator.prepare(make(kind))
    whole = batch["input_ids"].clone()
    with accelerator.maybe_context_parallel([*batch.values()], [1, 1, 1], {batch["labels"]}):
        loss = model(**batch).loss
        accelerator.backward(loss)
    assert torch.equal(batch["input_ids"], whole)
    differences = {}
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = parameter.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        differences[name] = float((grad - other.grad).abs().max())
    assert float(accelerator.reduce(loss.detach(), "mean")) == pytest.approx(expected.item(), rel=1e-6)
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
    plain_norm = float(torch.nn.utils.get_total_norm([item.grad for item in plain.parameters()]))
    assert get_model_tp_size(model) == sizes.get("tp_size")
    return norm, plain_norm, differences


@pytest.mark.parametrize(
    ("kind", "sizes"), [("Qwen3", {"tp_size": 2}), ("Llama", {"cp_size": 2}), ("Llama", {"tp_size": 2})]
)
def test_a_model_trains_as_on_one_process(world, kind, sizes):
    for norm, plain_norm, differences in world.run(step, kind, timeout_s=100, **sizes):
        assert norm == pytest.approx(plain_norm, rel=1e-5)
        assert max(differences.values()) < 1e-6, differences


def refusals() -> dict[str, str]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    found = {}

    def refuse(name: str, model: Any, batch: dict[str, torch.Tensor], *left_out: str) -> None:
        model = accelerator.prepare(model)
        shared = [value for key, value in batch.items() if key not in left_out]
        with (
            pytest.raises(ValueError, match=r".") as error,
            accelerator.maybe_context_parallel(shared, [1] * len(shared)),
        ):
            model(**batch)
        found[name] = str(error.value)

    for name, model in (
        ("eager", make("Llama", attn_implementation="eager")),
        ("state", make("Qwen3", layer_types=["full_attention", "linear_attention"])),
    ):
        with pytest.raises(ValueError, match=r".") as error:
            accelerator.prepare(model)
        found[name] = str(error.value)
    left = make_batch()
    left["attention_mask"] = left["attention_mask"].flip(1)
    model = make("Llama")
    refuse("left", model, left)
    refuse("mask", model, make_batch(), "attention_mask")
    refuse("labels", model, make_batch(), "labels")
    refuse("tokens", model, make_batch(), "input_ids")
    refuse("window", make("Mistral", sliding_window=8), make_batch())
    return found


def test_what_a_part_of_a_sequence_cannot_do_is_rejected(world):
    found = world.run(refusals, timeout_s=100)[0]

    assert "attn_implementation='eager'" in found["eager"]
    assert "Load it with attn_implementation='sdpa'" in found["eager"]
    assert "linear_attention, which pass a state along the sequence" in found["state"]
    assert "padding before tokens" in found["left"]
    assert "padding_side='right'" in found["left"]
    assert "attention_mask (2, 16)" in found["mask"]
    assert "labels inside maybe_context_parallel that are none of the buffers" in found["labels"]
    assert "input_ids (or inputs_embeds) of 16 tokens" in found["tokens"]
    assert "sliding_window=8, and sequences have 16" in found["window"]


def made_in_parts() -> tuple[float, int | None]:
    plain = make("Llama")
    from transformers import DistributedConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    # What from_pretrained(tp_plan="auto") does to a model before it loads weights into the parts.
    config, _, mesh = plain.prepare_distribute_model(DistributedConfig(tp_size=2))
    model = plain.maybe_distribute_model(plain, config, mesh)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.to_local().shape == (16, 16)
    model = accelerator.prepare(model)
    assert model.model.layers[0].mlp.up_proj.weight is weight
    loss = model(**make_batch()).loss
    accelerator.backward(loss)
    return loss.item(), get_model_tp_size(model)


def test_a_model_that_transformers_made_in_parts_passes_through(world):
    expected = make("Llama")(**make_batch()).loss.item()

    assert world.run(made_in_parts, timeout_s=100) == [(pytest.approx(expected), 2)] * 2


def make_generator(kind: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A small model with an encoder and a decoder, or with a decoder alone, and its prompt."""
    if kind == "Llama":
        return make(kind).eval(), {"input_ids": make_batch()["input_ids"][:, :6]}
    import transformers

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).eval(), {"input_ids": make_batch()["input_ids"]}


def generate(kind: str, engine: str) -> tuple[list[list[int]], list[list[int]]]:
    """What a model generates after a step, and what one process generates with its weights."""
    model, prompt = make_generator(kind)
    plain, _ = make_generator(kind)
    accelerator = Accelerator(cpu=True, **CASES[engine].options())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(**prompt, labels=prompt["input_ids"]).loss)
    optimizer.step()
    state = broadcast_object_list([accelerator.get_state_dict(model)])[0]
    plain.load_state_dict(state)
    rules = {"max_new_tokens": 5, "do_sample": False, "synced_gpus": engine != "ddp"}
    # FSDP1 gathers the outermost weights in the wrapper's forward alone.
    whole = (
        FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False)
        if engine == "fsdp1"
        else contextlib.nullcontext()
    )
    with torch.no_grad(), whole:
        found = accelerator.unwrap_model(model).generate(**prompt, **rules)
    with torch.no_grad():
        expected = plain.generate(**prompt, **(rules | {"synced_gpus": False}))
    return found.tolist(), expected.tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *itertools.product(["Llama", "T5"], ["ddp", "fsdp1", "fsdp2", "deepspeed 2", "deepspeed 3"]),
        ("Llama", "tp"),  # T5 has no plan
    ],
)
def test_a_trained_model_generates_under_each_engine(world, kind, engine):
    for found, expected in world.run(generate, kind, engine, timeout_s=100):
        assert found == expected
