"""peft on accel: adapters on models whose weights are partly on the disk."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.utils import ParallelismConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_state")]

IDS = torch.arange(16).reshape(2, 8) + 3
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
MAP = {f"model.layers.{number}": ("disk", "cpu")[number % 2] for number in range(4)} | {"": "cpu"}
Model = Any


def make() -> Model:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes)).eval()


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model that is saved, and an adapter of it, whose outputs differ."""
    monkeypatch.chdir(tmp_path)  # peft writes copies of a folder's files into the working folder
    model = make()
    model.save_pretrained("model", max_shard_size="20KB")
    torch.manual_seed(1)
    get_peft_model(make(), LoraConfig(**LORA)).save_pretrained("adapter")
    adapted = PeftModel.from_pretrained(model, "adapter")
    assert not torch.equal(logits(adapted), logits(make()))
    return adapted


def load() -> Model:
    model = LlamaForCausalLM.from_pretrained("model", device_map=MAP, offload_folder="offloaded")
    assert any(parameter.is_meta for parameter in model.parameters())
    return model


@torch.no_grad()
def logits(model: Model) -> torch.Tensor:
    return model(IDS).logits


def size(model: Model) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_an_adapter_on_a_model_partly_on_the_disk(plain: Model):
    memory = {"cpu": int(size(plain) * 0.7)}
    model = PeftModel.from_pretrained(load(), "adapter", max_memory=memory, offload_folder="more")

    assert any(parameter.is_meta for parameter in model.parameters())
    for _ in range(2):
        assert torch.equal(logits(model), logits(plain))
    merged = model.merge_and_unload()
    assert torch.equal(logits(merged), logits(plain.merge_and_unload()))


def test_an_adapter_brings_a_model_from_the_disk_to_memory(plain: Model):
    model = PeftModel.from_pretrained(load(), "adapter")

    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(logits(model), logits(plain))


def test_an_adapter_is_trained_next_to_weights_on_the_disk(plain: Model):
    options = {**LORA, "target_modules": ["layers.1.self_attn.q_proj", "layers.3.mlp.down_proj"]}
    models = []
    for base in (make(), load()):
        torch.manual_seed(2)
        models.append(get_peft_model(base, LoraConfig(**options)))
    for model in models:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        for _ in range(2):
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    expected, found = ({n: p for n, p in m.named_parameters() if p.requires_grad} for m in models)
    assert len(expected) == 4
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.equal(logits(models[1]), logits(models[0]))


def train_adapters(tensor_parallel: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Adapters on layers that the tp plan splits along either dimension, and on those that it does not."""
    torch.manual_seed(1)
    targets = ["q_proj", "o_proj", "down_proj", "embed_tokens", "lm_head"]
    model = get_peft_model(make(), LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).train()
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-2)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2)) if tensor_parallel else None
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        losses.append(loss.item())
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    return losses, {name: value.detach().clone() for name, value in state.items()}


def test_adapters_under_tensor_parallelism_train_as_on_one_process(world: Any):
    losses, expected = train_adapters(False)

    (parallel, state), (others, _) = world.run(train_adapters, True, timeout_s=100)

    assert parallel == others == pytest.approx(losses, rel=1e-5)
    assert list(state) == list(expected)
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)
