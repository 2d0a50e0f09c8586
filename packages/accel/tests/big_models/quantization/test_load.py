"""Models whose linear layers bitsandbytes quantizes, on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.big_modeling import init_empty_weights
from accel.utils import (
    BnbQuantizationConfig,
    has_4bit_bnb_layers,
    load_and_quantize_model,
)
from accel_ckpt.weights.files import save_weights
from accel_state.process.state import current_process

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.fixture
def bnb() -> Any:
    return pytest.importorskip("bitsandbytes")


class Net(nn.Module):
    """Linear layers, one inside of another module, others that are no linear layers, and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False))
        self.gate = nn.Linear(64, 64)
        self.attention = nn.MultiheadAttention(64, 2)
        self.register_buffer("shift", torch.arange(64.0), persistent=False)
        self.head = nn.Linear(64, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.embed(tokens))
        gated = torch.sigmoid(self.gate(hidden)) * hidden + self.shift.to(hidden.dtype) / 64
        out: torch.Tensor = self.head(gated)
        return out


TOKENS = torch.arange(8).reshape(2, 4)
EIGHT = {"load_in_8bit": True}
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "torch_dtype": "fp16"}


def make(tied: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(tied).half().eval()


def empty(tied: bool = False) -> Net:
    with init_empty_weights():
        return Net(tied).half().eval()


def quantized(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__.startswith("Linear") and type(module) is not nn.Linear
    ]


def by_plain_means(bnb: Any, names: list[str], **options: Any) -> Net:
    """Quantize layers one by one, as bitsandbytes documents it."""
    model = make()
    for name in names:
        old = model.get_submodule(name)
        sizes = (old.in_features, old.out_features, old.bias is not None)
        if options.get("load_in_8bit"):
            new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
        else:
            new = bnb.nn.Linear4bit(
                *sizes,
                compute_dtype=torch.float16,
                quant_type=options.get("bnb_4bit_quant_type", "fp4"),
                compress_statistics=options.get("bnb_4bit_use_double_quant", False),
            )
        new.load_state_dict(old.state_dict())
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, new.to("cpu"))
    return model.eval()


LAYERS = ["block.0", "block.2", "gate"]


@pytest.mark.parametrize(
    "options",
    [
        EIGHT,
        FOUR,
        {**FOUR, "bnb_4bit_quant_type": "fp4"},
        {**FOUR, "bnb_4bit_use_double_quant": True},
    ],
    ids=["8 bits", "nf4", "fp4", "double"],
)
@pytest.mark.parametrize("where", ["loaded", "file", "shards", "torch file"])
def test_outputs_are_those_of_layers_quantized_by_plain_means(
    bnb: Any, tmp_path: Path, options: dict[str, Any], where: str
) -> None:
    config = BnbQuantizationConfig(**options)
    if where == "loaded":
        model = load_and_quantize_model(make(), config)
    else:
        size = "5KB" if where == "shards" else "1GB"
        save_weights(make().state_dict(), tmp_path, size, where != "torch file")
        given = empty()
        model = load_and_quantize_model(given, config, weights_location=tmp_path)
        assert model is given

    plain = by_plain_means(bnb, LAYERS, **options)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), plain(TOKENS))
    assert quantized(model) == LAYERS
    assert has_4bit_bnb_layers(model) == (options is not EIGHT)
    assert not model.training
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_weights_take_a_half_and_a_quarter_of_the_memory(bnb: Any) -> None:
    plain = sum(make().get_parameter(f"{name}.weight").nbytes for name in LAYERS)
    for options, part in ((EIGHT, 2), (FOUR, 4)):
        model = load_and_quantize_model(make(), BnbQuantizationConfig(**options))
        assert sum(model.get_parameter(f"{name}.weight").nbytes for name in LAYERS) == plain // part


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"skip_modules": []}, ["block.0", "block.2", "gate", "head"]),
        ({"skip_modules": ["block"]}, ["gate", "head"]),
        ({"skip_modules": ["block.2", "head"]}, ["block.0", "gate"]),
        ({"skip_modules": ["2", "gate"]}, ["block.0", "head"]),
        ({"keep_in_fp32_modules": ["gate"]}, ["block.0", "block.2"]),
    ],
)
def test_modules_that_are_skipped_keep_their_weights(
    bnb: Any, tmp_path: Path, options: dict[str, Any], expected: list[str]
) -> None:
    save_weights(make().state_dict(), tmp_path, "1GB", True)

    model = load_and_quantize_model(
        empty(), BnbQuantizationConfig(load_in_8bit=True, **options), weights_location=tmp_path
    )

    assert quantized(model) == expected
    for name, value in make().state_dict().items():
        if name.rpartition(".")[0] not in expected:
            kept = options.get("keep_in_fp32_modules") and "gate" in name
            assert model.state_dict()[name].dtype is (torch.float32 if kept else torch.float16)
            assert torch.equal(model.state_dict()[name].half(), value)


def test_a_device_by_name_of_modules(bnb: Any) -> None:
    device_map = {"": "cpu", "gate": "cpu"}

    model = load_and_quantize_model(make(), BnbQuantizationConfig(**EIGHT), device_map=device_map)

    assert quantized(model) == LAYERS


@pytest.mark.parametrize("strategy", ["auto", "sequential"])
@pytest.mark.parametrize("options", [{}, {"keep_in_fp32_modules": ["embed"]}])
def test_text_as_device_map_finds_the_device_with_room(bnb: Any, strategy: str, options: Any) -> None:
    config = BnbQuantizationConfig(**EIGHT, **options)
    model = load_and_quantize_model(make(), config, device_map=strategy)
    layers = quantized(model)
    counted = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())

    assert layers
    limits = {"cpu": counted, "disk": "1GB"}
    same = load_and_quantize_model(make(), config, device_map=strategy, max_memory=limits)
    assert quantized(same) == layers
    with pytest.raises(NotImplementedError, match=f"takes {counted} bytes"):
        load_and_quantize_model(make(), config, device_map=strategy, max_memory={"cpu": counted - 1})


def test_weights_that_are_not_quantized_get_the_dtype(bnb: Any) -> None:
    model = load_and_quantize_model(make(), BnbQuantizationConfig(load_in_4bit=True, torch_dtype="bf16"))

    assert model.embed.weight.dtype is torch.bfloat16
    assert model.gate.bias.dtype is torch.bfloat16
    assert model.embed.weight.requires_grad
    assert not model.gate.weight.requires_grad


@pytest.mark.parametrize("loaded", [True, False])
def test_a_head_that_shares_the_embedding_stays_tied(bnb: Any, tmp_path: Path, loaded: bool) -> None:
    state = make(tied=True).state_dict()
    del state["head.weight"]
    save_weights(state, tmp_path, "1GB", True)
    given, location = (make(tied=True), None) if loaded else (empty(tied=True), tmp_path)

    model = load_and_quantize_model(given, BnbQuantizationConfig(**EIGHT), weights_location=location)

    assert quantized(model) == LAYERS
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, state["embed.weight"])


@pytest.mark.parametrize("options", [EIGHT, FOUR, {**FOUR, "bnb_4bit_use_double_quant": True}])
@pytest.mark.parametrize("used", [True, False])
def test_a_quantized_model_is_saved_and_loaded(
    bnb: Any, tmp_path: Path, options: dict[str, Any], used: bool
) -> None:
    config = BnbQuantizationConfig(**options)
    model = load_and_quantize_model(make(), config)
    with torch.no_grad():
        expected = copy.deepcopy(model)(TOKENS)
        if used:
            model(TOKENS)
    save_weights(model.state_dict(), tmp_path, "1GB", True)

    loaded = load_and_quantize_model(empty(), config, weights_location=tmp_path)

    assert quantized(loaded) == LAYERS
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS), expected)
    other = BnbQuantizationConfig(**(FOUR if options is EIGHT else EIGHT))
    with pytest.raises(ValueError, match=r"block\.0 was saved with .*which is no layer quantized to"):
        load_and_quantize_model(empty(), other, weights_location=tmp_path)


def test_training_goes_through_quantized_layers(bnb: Any) -> None:
    model = load_and_quantize_model(
        make(), BnbQuantizationConfig(load_in_4bit=True, torch_dtype="fp32", bnb_4bit_compute_dtype="fp32")
    )

    model(TOKENS).sum().backward()

    assert model.embed.weight.grad.abs().sum() > 0
    assert model.gate.weight.grad is None


def test_what_cannot_be_done_is_named(bnb: Any, tmp_path: Path) -> None:
    config = BnbQuantizationConfig(**EIGHT)
    with pytest.raises(ValueError, match="Net is on the meta device, and has no weights to quantize"):
        load_and_quantize_model(empty(), config)
    state = make().state_dict()
    del state["gate.weight"], state["embed.weight"]
    save_weights(state, tmp_path, "1GB", True)
    with pytest.raises(ValueError, match=r"no weights for: embed\.weight, gate\.weight"):
        load_and_quantize_model(empty(), config, weights_location=tmp_path)
    with pytest.raises(NotImplementedError, match=r"Net takes \d+ bytes .* has as much \(cpu: 10\)"):
        load_and_quantize_model(make(), config, device_map="auto", max_memory={"cpu": 10})
    with pytest.raises(ValueError, match="or one of auto, balanced, balanced_low_0, sequential, not 'best'"):
        load_and_quantize_model(make(), config, device_map="best")
    if current_process().device.type == "cpu":
        with pytest.raises(ValueError, match="this process uses no accelerator, and has no device 0"):
            load_and_quantize_model(make(), config, device_map={"": 0})
    with pytest.raises(ValueError, match="device_map says nothing about"):
        load_and_quantize_model(make(), config, device_map={"block": "cpu"})
    model = make()
    with pytest.raises(NotImplementedError, match="device_map puts Net on cpu, disk"):
        load_and_quantize_model(model, config, device_map={"": "cpu", "gate": "disk"})
    assert quantized(model) == []
    with pytest.raises(FileNotFoundError):
        load_and_quantize_model(empty(), config, weights_location=tmp_path / "nothing")


@pytest.mark.parametrize("name", ["gate.weight", "embed.weight"])
def test_a_shape_that_differs_is_named(bnb: Any, tmp_path: Path, name: str) -> None:
    save_weights({**make().state_dict(), name: torch.ones(3, 4)}, tmp_path, "1GB", True)

    with pytest.raises(RuntimeError, match=rf"{name} has the shape \[3, 4\]"):
        load_and_quantize_model(model := empty(), BnbQuantizationConfig(**EIGHT), weights_location=tmp_path)
    assert quantized(model) == []
    assert all(parameter.is_meta for parameter in model.parameters())


def test_settings_without_effect_are_told(bnb: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'heads' in skip_modules .* is no module of Net"):
        load_and_quantize_model(make(), BnbQuantizationConfig(load_in_8bit=True, skip_modules=["heads"]))
    with pytest.warns(UserWarning, match="Embedding has no linear layer that is quantized"):
        load_and_quantize_model(nn.Embedding(2, 2), BnbQuantizationConfig(**EIGHT))
    with pytest.warns(UserWarning, match="offload_folder is ignored"):
        load_and_quantize_model(make(), BnbQuantizationConfig(**EIGHT), offload_folder=tmp_path)
    save_weights({**make().state_dict(), "old": torch.ones(1)}, tmp_path, "1GB", True)
    with pytest.warns(UserWarning, match="Weights that Net does not have are ignored: old"):
        load_and_quantize_model(empty(), BnbQuantizationConfig(**EIGHT), weights_location=tmp_path)
