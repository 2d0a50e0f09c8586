"""transformers on accel: models from folders, spread over memory and the disk, and its Trainer."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

import accel
from accel.drop_in import INTERFACE_VERSION
from repo_checks.documented import client_entries

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        BertForMaskedLM,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        T5ForConditionalGeneration,
        Trainer,
        TrainingArguments,
        default_data_collator,
        utils,
    )

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_state")]

WORDS = 61
IDS = torch.arange(16).reshape(2, 8) + 3
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (GPT2LMHeadModel, {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}),
    "llama": (
        LlamaForCausalLM,
        {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2},
    ),
    "t5": (
        T5ForConditionalGeneration,
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
    ),
    "bert": (
        BertForMaskedLM,
        {
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 16,
        },
    ),
}
Model = Any


def make(family: str) -> Model:
    model_class, options = FAMILIES[family]
    torch.manual_seed(0)
    return model_class(model_class.config_class(vocab_size=WORDS, **options)).eval()


@torch.no_grad()
def logits(model: Model) -> torch.Tensor:
    more = {"decoder_input_ids": IDS[:, :5]} if model.config.is_encoder_decoder else {}
    return model(input_ids=IDS, attention_mask=torch.ones_like(IDS), **more).logits


def assert_same_state(model: Model, plain: Model) -> None:
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_every_name_that_clients_import_is_there_under_both_names():
    text = (Path(__file__).parents[2] / "tools/reference/client-imports.txt").read_text()
    entries = list(client_entries(text))

    assert len(entries) > 80
    for entry in entries:
        other = entry.module.replace("accel", "accelerate", 1)
        ours, theirs = importlib.import_module(entry.module), importlib.import_module(other)
        for attribute in entry.attributes:
            ours, theirs = getattr(ours, attribute), getattr(theirs, attribute)
        if entry.name == "accel.__version__":
            assert theirs == INTERFACE_VERSION
        elif entry.name != "accel":  # the top modules differ in their versions
            assert theirs is ours, entry.name


@pytest.fixture(params=FAMILIES)
def plain(request: pytest.FixtureRequest) -> Model:
    return make(request.param)


@pytest.fixture(params=["5GB", "20KB"], ids=["one file", "shards"])
def saved(request: pytest.FixtureRequest, plain: Model, tmp_path: Path) -> Path:
    plain.save_pretrained(tmp_path / "saved", max_shard_size=request.param)
    return tmp_path / "saved"


def load_in_part(plain: Model, folder: Path, **options: Any) -> Model:
    """With memory for six tenths of the weights."""
    size = sum(parameter.nbytes for parameter in plain.parameters())
    model = type(plain).from_pretrained(
        folder,
        device_map="auto",
        max_memory={"cpu": int(size * 0.6)},
        offload_folder=folder.parent / "offloaded",
        **options,
    )
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert any(parameter.is_meta for parameter in model.parameters())
    return model


def test_accelerate_is_accel_here():
    assert importlib.metadata.version("accelerate") == accelerate.__version__ == INTERFACE_VERSION
    assert utils.is_accelerate_available()
    assert accelerate.dispatch_model is accel.dispatch_model
    names = [name for name in sys.modules if name.startswith("accelerate.")]
    assert "accelerate.hooks" in names
    assert all(sys.modules[name].__name__.startswith("accel.") for name in names)
    assert isinstance(accelerate, types.ModuleType)
    assert accelerate.__file__ == accel.__file__


def test_a_model_is_spread_over_memory_and_disk(plain: Model, saved: Path):
    model = load_in_part(plain, saved)

    assert not list((saved.parent / "offloaded").glob("*.dat"))  # the saved files serve
    for _ in range(2):
        assert torch.equal(logits(model), logits(plain))
    assert_same_state(model, plain)


@pytest.mark.parametrize("saved", ["20KB"], indirect=True)
def test_a_model_that_is_spread_is_saved_again(plain: Model, saved: Path, tmp_path: Path):
    load_in_part(plain, saved).save_pretrained(tmp_path / "again", max_shard_size="30KB")

    again = type(plain).from_pretrained(tmp_path / "again")

    assert torch.equal(logits(again), logits(plain))
    assert_same_state(again, plain)


@pytest.mark.parametrize("saved", ["20KB"], indirect=True)
def test_another_dtype(plain: Model, saved: Path):
    whole = type(plain).from_pretrained(saved, dtype=torch.bfloat16)

    model = load_in_part(whole, saved, dtype=torch.bfloat16)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(model), logits(whole))


@pytest.mark.parametrize("plain", ["gpt2", "llama", "t5"], indirect=True)
@pytest.mark.parametrize("saved", ["20KB"], indirect=True)
@pytest.mark.parametrize("beams", [1, 2])
def test_generate(plain: Model, saved: Path, beams: int):
    options = {
        "max_new_tokens": 6,
        "num_beams": beams,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }

    found = load_in_part(plain, saved).generate(IDS, **options)

    assert torch.equal(found, plain.generate(IDS, **options))


@pytest.mark.parametrize("plain", ["gpt2"], indirect=True)
@pytest.mark.parametrize("saved", ["5GB"], indirect=True)
def test_a_full_model_in_memory(plain: Model, saved: Path):
    for device_map in ("auto", "cpu", {"": "cpu"}):
        model = type(plain).from_pretrained(saved, device_map=device_map)

        assert torch.equal(logits(model), logits(plain))
        assert_same_state(model, plain)


@pytest.mark.parametrize("plain", ["llama"], indirect=True)
def test_trainer_takes_the_steps_of_a_plain_loop(plain: Model, tmp_path: Path):
    rows = [{"input_ids": IDS[i % 2] + i, "labels": IDS[i % 2] + i} for i in range(8)]
    arguments = TrainingArguments(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=1.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        train_sampling_strategy="sequential",
    )
    trainer = Trainer(
        copy.deepcopy(plain), arguments, train_dataset=rows, data_collator=default_data_collator
    )
    trainer.train()

    assert isinstance(trainer.accelerator, accel.Accelerator)
    plain.train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for start in (0, 4):
        ids = torch.stack([row["input_ids"] for row in rows[start : start + 4]])
        plain(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for found, expected in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
