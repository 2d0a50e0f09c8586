"""Models of transformers, made from small configurations, offloaded, dispatched and loaded to their places.

Every output is compared bit by bit with that of the plain model.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel.hooks import remove_hook_from_submodules
from accel.utils import compute_module_sizes, find_tied_parameters

with warnings.catch_warnings():  # of the libraries that these import, about themselves
    warnings.simplefilter("ignore")
    from transformers import BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM, T5ForConditionalGeneration

WORDS = 61
IDS = torch.arange(16).reshape(2, 8) + 3
META = torch.device("meta")
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (GPT2LMHeadModel, {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}),
    "llama": (
        LlamaForCausalLM,
        {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "llama, tied": (
        LlamaForCausalLM,
        {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "t5": (
        T5ForConditionalGeneration,
        {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
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
TIED = {"gpt2", "llama, tied", "t5", "bert"}
Model = Any


def make(family: str, **options: Any) -> Model:
    model_class, usual = FAMILIES[family]
    torch.manual_seed(0)
    return model_class(model_class.config_class(vocab_size=WORDS, **usual | options)).eval()


def make_empty(family: str) -> Model:
    with init_empty_weights():
        empty = make(family)
    empty.tie_weights()
    return empty


@torch.no_grad()
def logits(model: Model) -> torch.Tensor:
    more = {"decoder_input_ids": IDS[:, :5]} if model.config.is_encoder_decoder else {}
    return model(input_ids=IDS, attention_mask=torch.ones_like(IDS), **more).logits


def assert_computes(model: Model, plain: Model) -> None:
    expected = logits(plain)
    for _ in range(3):  # the first forward learns the order in which weights are read ahead
        assert torch.equal(logits(model), expected)


def assert_same_state(model: Model, plain: Model) -> None:
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].device == value.device
        assert torch.equal(state[name], value), name


def assert_without_hooks(model: Model, plain: Model) -> None:
    """No attribute, no hook of torch and no placeholder is left."""
    for (name, module), other in zip(model.named_modules(), plain.modules(), strict=True):
        known = vars(other).keys() | {"hf_device_map"}
        assert vars(module).keys() <= known, name
        assert not module._state_dict_hooks, name
        assert not module._load_state_dict_pre_hooks, name
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert find_tied_parameters(model) == find_tied_parameters(plain)
    assert_computes(model, plain)


def halves(model: Model, swap: bool = False) -> dict[str, str]:
    """The leaves of a model in turns in memory and on the disk, in the order of the model."""
    names = [name for name, module in model.named_modules() if not list(module.children())]
    return {name: ("cpu", "disk")[(number + swap) % 2] for number, name in enumerate(names)} | {"": "cpu"}


def save(plain: Model, folder: Path, shards: bool) -> Path:
    plain.save_pretrained(folder, max_shard_size="20KB" if shards else "5GB")
    assert (folder / "model.safetensors.index.json").exists() == shards
    return folder


def part(model: Model, share: float = 0.5) -> dict[str, int]:
    """Memory for the largest layer on the disk, which runs there, and for a share of the rest."""
    size = compute_module_sizes(model)[""]
    largest = max(sum(p.nbytes for p in block.parameters()) for block in unsplit(model))
    return {"cpu": int((size - largest) * share) + largest}


def unsplit(model: Model) -> list[nn.Module]:
    whole = model._no_split_modules or ()
    return [part for part in model.modules() if type(part).__name__ in whole or not list(part.children())]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["memory", "disk"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Model], Model]:
    if request.param == "memory":
        return cpu_offload
    return lambda model: disk_offload(model, tmp_path / "offload")


def test_an_offloaded_model_and_the_same_without_its_hooks(family: str, offload: Callable[..., Model]):
    plain = make(family)
    model = offload(copy.deepcopy(plain))

    assert all(parameter.is_meta for parameter in model.parameters())
    assert bool(find_tied_parameters(model)) == (family in TIED)
    assert_computes(model, plain)
    assert_same_state(model, plain)

    remove_hook_from_submodules(model)

    assert_without_hooks(model, plain)
    assert_same_state(model, plain)


@pytest.mark.parametrize("swap", [False, True])
def test_half_of_the_leaves_on_the_disk(family: str, swap: bool, tmp_path: Path):
    plain = make(family)
    device_map = halves(plain, swap)
    model = dispatch_model(copy.deepcopy(plain), device_map, main_device="cpu", offload_dir=tmp_path)

    assert any(parameter.is_meta for parameter in model.parameters())
    assert not all(parameter.is_meta for parameter in model.parameters())
    assert_computes(model, plain)
    assert_same_state(model, plain)

    remove_hook_from_submodules(model)

    assert_without_hooks(model, plain)


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_hooks_where_all_is_in_one_place(family: str, device: str, tmp_path: Path):
    plain = make(family)
    model = dispatch_model(copy.deepcopy(plain), {"": device}, offload_dir=tmp_path, force_hooks=True)

    assert all(parameter.is_meta == (device == "disk") for parameter in model.parameters())
    assert_computes(model, plain)
    assert_same_state(model, plain)


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_a_saved_model_is_loaded_in_part_and_read_where_it_is(family: str, shards: bool, tmp_path: Path):
    plain = make(family)
    folder, offloaded = save(plain, tmp_path / "saved", shards), tmp_path / "offloaded"
    empty = make_empty(family)

    model = load_checkpoint_and_dispatch(
        empty,
        folder,
        device_map="auto",
        max_memory=part(plain),
        no_split_module_classes=list(plain._no_split_modules or []),
        offload_folder=offloaded,
        offload_state_dict=True,
    )

    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    on_disk = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_meta)
    assert 0 < on_disk < sum(parameter.nbytes for parameter in plain.parameters())
    assert not offloaded.exists() or not list(offloaded.iterdir())
    assert_computes(model, plain)
    assert_same_state(model, plain)


def test_another_dtype_is_written_once(family: str, tmp_path: Path):
    plain = make(family)
    folder, offloaded = save(plain, tmp_path / "saved", shards=True), tmp_path / "offloaded"
    for parameter in plain.parameters():  # and no buffer that the checkpoint lacks
        parameter.data = parameter.data.bfloat16()

    model = load_checkpoint_and_dispatch(
        make_empty(family),
        folder,
        infer_auto_device_map(plain, max_memory=part(plain)),
        offload_folder=offloaded,
        dtype="bfloat16",
    )

    index = json.loads((offloaded / "index.json").read_text())
    assert {entry["dtype"] for entry in index.values()} == {"bfloat16"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert any(parameter.is_meta for parameter in model.parameters())
    assert_computes(model, plain)
    assert_same_state(model, plain)


def test_all_in_memory_from_a_file(family: str, tmp_path: Path):
    plain = make(family)
    folder = save(plain, tmp_path / "saved", shards=True)

    model = load_checkpoint_and_dispatch(make_empty(family), folder, device_map="auto")

    assert_without_hooks(model, plain)
    assert_same_state(model, plain)


@pytest.mark.parametrize("family", ["gpt2", "llama, tied"], indirect=True)
def test_generate(family: str, tmp_path: Path):
    plain = make(family)
    model = load_checkpoint_and_dispatch(
        make_empty(family),
        save(plain, tmp_path / "saved", shards=True),
        device_map="auto",
        max_memory=part(plain),
        offload_folder=tmp_path / "offloaded",
    )
    options = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    for choice in ({"do_sample": False}, {"do_sample": False, "num_beams": 2}, {"do_sample": True}):
        expected, found = (
            torch.random.manual_seed(1) and which.generate(IDS, **options, **choice)
            for which in (plain, model)
        )

        assert expected.shape == (2, 14)
        assert torch.equal(found, expected)


def test_a_gradient_reaches_what_is_before_offloaded_layers(family: str, offload: Callable[..., Model]):
    plain = make(family)
    model = offload(copy.deepcopy(plain))
    gradients = []
    for which in (plain, model):
        embedded = plain.get_input_embeddings()(IDS).detach().requires_grad_()
        more = {"decoder_input_ids": IDS[:, :5]} if which.config.is_encoder_decoder else {}
        which(inputs_embeds=embedded, **more).logits.square().mean().backward()
        gradients.append(embedded.grad)

    assert gradients[0].abs().sum() > 0
    assert torch.equal(*gradients)


def test_a_compiled_model(tmp_path: Path):
    plain = make("gpt2", n_layer=1)
    model = dispatch_model(copy.deepcopy(plain), halves(plain), main_device="cpu", offload_dir=tmp_path)
    # Traced as for any backend, but run by torch: sums of generated kernels differ in the last bits.
    compiled = torch.compile(model, backend="eager")

    for _ in range(2):
        assert torch.equal(logits(compiled), logits(plain))
    torch.compiler.reset()


def load_from_rank_0(folder: str, family: str) -> dict[str, torch.Tensor]:
    from accel_state.process.state import PartialState

    model = make(family)
    for parameter in model.parameters():
        parameter.data.fill_(PartialState().process_index)
    here = folder if PartialState().is_main_process else "nothing is here"
    load_checkpoint_in_model(model, here, broadcast_from_rank0=True)
    return model.state_dict()


def test_one_process_reads_for_both(world: Any, tmp_path: Path):
    plain = make("llama")
    folder = save(plain, tmp_path / "saved", shards=True)

    for state in world.run(load_from_rank_0, str(folder), "llama"):
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
