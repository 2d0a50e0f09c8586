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
def test_text_as_device_map_counts_quantized_weights(
    bnb: Any, strategy: str, options: Any, tmp_path: Path
) -> None:
    config = BnbQuantizationConfig(**EIGHT, **options)
    model = load_and_quantize_model(make(), config, device_map=strategy)
    counted = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())

    assert quantized(model) == LAYERS
    limits = {"cpu": counted, "disk": "1GB"}
    same = load_and_quantize_model(make(), config, device_map=strategy, max_memory=limits)
    assert same.hf_device_map == {"": "cpu"}
    less = {"cpu": counted - 1}
    parts = load_and_quantize_model(
        make(), config, device_map=strategy, max_memory=less, offload_folder=tmp_path
    )
    assert set(parts.hf_device_map.values()) == {"cpu", "disk"}
    assert sum(p.nbytes for p in parts.parameters() if not p.is_meta) < counted
    if not options:  # its layers do not take float32
        with torch.no_grad():
            assert torch.equal(parts(TOKENS), model(TOKENS))


def test_classes_that_are_not_split_are_on_one_device(bnb: Any, tmp_path: Path) -> None:
    model = load_and_quantize_model(
        make(),
        BnbQuantizationConfig(**EIGHT),
        device_map="auto",
        max_memory={"cpu": 15_000},
        no_split_module_classes=["Sequential"],
        offload_folder=tmp_path,
    )

    assert len({weight.is_meta for weight in model.block.parameters()}) == 1
    assert model.block[0].weight.is_meta


ON_THE_DISK = {
    "a block": {"": "cpu", "block": "disk"},
    "embed and gate": {"": "cpu", "embed": "disk", "gate": "disk"},
}


@pytest.mark.parametrize(
    "options",
    [EIGHT, FOUR, {**FOUR, "bnb_4bit_use_double_quant": True}],
    ids=["8 bits", "4 bits", "double"],
)
@pytest.mark.parametrize("where", ["loaded", "file", "saved quantized"])
@pytest.mark.parametrize("device_map", [*ON_THE_DISK.values(), {"": "disk"}], ids=[*ON_THE_DISK, "all"])
def test_parts_on_the_disk_compute_as_in_memory(
    bnb: Any, tmp_path: Path, options: dict[str, Any], where: str, device_map: dict[str, str]
) -> None:
    config = BnbQuantizationConfig(**options)
    plain = load_and_quantize_model(make(), config)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    given, location = make(), None
    if where != "loaded":
        save_weights(state if where == "saved quantized" else given.state_dict(), tmp_path, "1GB", True)
        given, location = empty(), tmp_path

    model = load_and_quantize_model(
        given, config, location, device_map=device_map, offload_folder=tmp_path / "offload"
    )

    assert model is given
    assert model.hf_device_map == device_map
    assert quantized(model) == quantized(plain)
    on_disk = [name for name in device_map if device_map[name] == "disk"]
    for name, parameter in model.named_parameters():
        assert parameter.is_meta == any(name.startswith(part) for part in on_disk), name
        assert parameter.dtype == plain.get_parameter(name).dtype
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(TOKENS), plain(TOKENS))
    # 4-bit layers in memory are laid out for the CPU as they run, and their statistics rounded for that.
    found, used = model.state_dict(), plain.state_dict()
    assert list(found) == list(state)
    for name, value in found.items():
        is_stored = any(name.startswith(part) for part in on_disk)
        assert torch.equal(value, (state if is_stored else used)[name]), name


@pytest.mark.parametrize("options", [EIGHT, FOUR], ids=["8 bits", "4 bits"])
def test_weights_on_the_disk_have_the_size_of_quantized_ones(
    bnb: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    load_and_quantize_model(
        make(), BnbQuantizationConfig(**options), device_map=ON_THE_DISK["a block"], offload_folder=tmp_path
    )

    assert (tmp_path / "block.0.weight.dat").stat().st_size == 64 * 64 // (1 if options is EIGHT else 2)


def test_a_folder_that_cannot_be_written_leaves_the_model_empty(bnb: Any, tmp_path: Path) -> None:
    save_weights(make().state_dict(), tmp_path, "1GB", True)
    model, before = empty(), str(empty())
    in_the_way = tmp_path / "offload" / "gate.weight.dat"
    in_the_way.mkdir(parents=True)

    with pytest.raises(OSError, match=r"gate\.weight \(4096 bytes\) cannot be offloaded"):
        load_and_quantize_model(
            model,
            BnbQuantizationConfig(**EIGHT),
            tmp_path,
            device_map={"": "disk"},
            offload_folder=tmp_path / "offload",
        )

    assert str(model) == before
    assert all(parameter.is_meta for parameter in model.parameters())
    assert list((tmp_path / "offload").iterdir()) == [in_the_way]


def devices_of(model: nn.Module) -> dict[str, str]:
    return {name: str(parameter.device) for name, parameter in model.named_parameters()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [EIGHT, FOUR], ids=["8 bits", "4 bits"])
def test_parts_next_to_a_gpu_are_quantized_too(bnb: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    config = BnbQuantizationConfig(**options)
    plain = load_and_quantize_model(make(), config, device_map={"": 0})

    model = load_and_quantize_model(
        make(), config, device_map={"": 0, "block": "cpu", "gate": "disk"}, offload_folder=tmp_path
    )

    assert quantized(model) == LAYERS
    assert devices_of(model)["embed.weight"] == "cuda:0"
    for _ in range(2):
        with torch.no_grad():
            # Weights that were quantized on the CPU may differ by a rounding.
            assert torch.allclose(model(TOKENS.cuda()), plain(TOKENS.cuda()), atol=0.05)
        assert {devices_of(model)[f"{name}.weight"] for name in LAYERS} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("options", [EIGHT, FOUR], ids=["8 bits", "4 bits"])
def test_a_model_over_two_gpus(bnb: Any, options: dict[str, Any]) -> None:
    config = BnbQuantizationConfig(**options)
    plain = load_and_quantize_model(make(), config, device_map={"": 0})

    model = load_and_quantize_model(make(), config, device_map={"": 0, "gate": 1})

    assert devices_of(model)["gate.weight"] == "cuda:1"
    with torch.no_grad():
        assert torch.equal(model(TOKENS.cuda(0)), plain(TOKENS.cuda(0)))


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
    with pytest.raises(ValueError, match=r"block\.0 was saved with .*which is not a layer quantized to"):
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
    with pytest.raises(ValueError, match="device_map puts '' on the disk: pass"):
        load_and_quantize_model(make(), config, device_map="auto", max_memory={"cpu": 20_000})
    with pytest.raises(ValueError, match="or one of auto, balanced, balanced_low_0, sequential, not 'best'"):
        load_and_quantize_model(make(), config, device_map="best")
    if current_process().device.type == "cpu":
        with pytest.raises(
            ValueError, match="puts '' on 0, which does not exist: this process uses no accelerator"
        ):
            load_and_quantize_model(make(), config, device_map={"": 0})
    with pytest.raises(ValueError, match="device_map has no device for"):
        load_and_quantize_model(make(), config, device_map={"block": "cpu"})
    model = make()
    with pytest.raises(ValueError, match="device_map puts 'gate' on the disk: pass offload_folder"):
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


def test_settings_without_effect_are_reported(bnb: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'heads' in skip_modules .* is no module of Net"):
        load_and_quantize_model(make(), BnbQuantizationConfig(load_in_8bit=True, skip_modules=["heads"]))
    with pytest.warns(UserWarning, match="Embedding has no linear layer that is quantized"):
        load_and_quantize_model(nn.Embedding(2, 2), BnbQuantizationConfig(**EIGHT))
    with pytest.warns(UserWarning, match="max_memory is ignored: it applies only to strategies"):
        load_and_quantize_model(make(), BnbQuantizationConfig(**EIGHT), max_memory={"cpu": "1GB"})
    save_weights({**make().state_dict(), "old": torch.ones(1)}, tmp_path, "1GB", True)
    with pytest.warns(UserWarning, match="Weights that Net does not have are ignored: old"):
        load_and_quantize_model(empty(), BnbQuantizationConfig(**EIGHT), weights_location=tmp_path)
