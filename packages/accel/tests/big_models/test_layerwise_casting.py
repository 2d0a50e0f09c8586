"""Weights that rest in a small dtype and are cast for each layer's forward."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import nn

from accel.big_modeling import attach_layerwise_casting_hooks
from accel.hooks import (
    LayerwiseCastingHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Net(nn.Module):
    """Layers that are cast, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.conv = nn.Conv1d(3, 3, 1)
        self.proj_out = nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.conv(self.first(self.embed(tokens)))
        out: torch.Tensor = self.proj_out(hidden)
        return out


def make() -> Net:
    torch.manual_seed(0)
    return Net().to(BF16)


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def small(model: nn.Module) -> list[str]:
    """Return the modules whose weights are float8."""
    return [
        name.removesuffix(".weight")
        for name, dtype in dtypes(model).items()
        if dtype is FP8 and "weight" in name
    ]


TOKENS = torch.tensor([[0, 3, 7], [1, 2, 2]])


def test_outputs_are_those_of_rounded_weights() -> None:
    model, plain = make(), make()
    attach_layerwise_casting_hooks(model, FP8, BF16)
    for name in ("first.0", "conv", "proj_out"):
        for parameter in plain.get_submodule(name).parameters():
            parameter.data = parameter.data.to(FP8).to(BF16)

    outputs = [model(TOKENS) for _ in range(3)]

    assert all(torch.equal(output, plain(TOKENS)) for output in outputs)
    assert small(model) == ["first.0", "conv", "proj_out"]
    assert sum(p.nbytes for p in model.parameters()) == sum(
        p.numel() * (1 if name.split(".")[0] in ("conv", "proj_out") or "first.0" in name else 2)
        for name, p in model.named_parameters()
    )


def test_weights_are_cast_in_the_forward_alone() -> None:
    model = make()
    attach_layerwise_casting_hooks(model, FP8, BF16)
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    model.conv.register_forward_pre_hook(
        lambda module, args: seen.append((model.proj_out.weight.dtype, model.first[0].weight.dtype))
    )
    old = model.proj_out._old_forward
    model.proj_out._old_forward = lambda x: (
        seen.append((model.proj_out.weight.dtype, model.conv.weight.dtype)),
        old(x),
    )[1]

    model(TOKENS)

    assert seen == [(FP8, FP8), (BF16, FP8)]


@pytest.mark.parametrize(
    ("pattern", "classes", "expected"),
    [
        (None, None, ["first.0", "conv", "proj_out"]),
        ((), None, ["first.0", "conv", "proj_out"]),
        ("proj", None, ["first.0", "conv"]),
        (("^first$", "conv"), None, ["proj_out"]),
        ("^0$", None, ["first.0", "conv", "proj_out"]),
        (None, (nn.Sequential,), ["conv", "proj_out"]),
        (("conv",), (nn.Linear,), []),
        (None, (Net,), []),
    ],
)
def test_modules_are_skipped_with_all_inside(pattern: Any, classes: Any, expected: list[str]) -> None:
    model = make()

    attach_layerwise_casting_hooks(model, FP8, BF16, pattern, classes)

    assert small(model) == expected


def test_a_single_layer() -> None:
    layer = nn.Linear(4, 4).to(BF16)
    attach_layerwise_casting_hooks(layer, FP8, BF16)

    assert layer.weight.dtype is FP8
    assert layer(torch.ones(1, 4, dtype=BF16)).dtype is BF16


def test_a_removed_hook_leaves_no_trace() -> None:
    model = make()
    before = {name: set(vars(part)) for name, part in model.named_modules()}
    rounded = {name: value.to(FP8).to(BF16) for name, value in model.proj_out.state_dict().items()}
    parameters = [id(parameter) for parameter in model.parameters()]
    attach_layerwise_casting_hooks(model, FP8, BF16)
    model(TOKENS)

    remove_hook_from_submodules(model)

    assert {name: set(vars(part)) for name, part in model.named_modules()} == before
    assert set(dtypes(model).values()) == {BF16}
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert all(torch.equal(value, rounded[name]) for name, value in model.proj_out.state_dict().items())


def test_storage_wider_than_compute_loses_nothing() -> None:
    model = nn.Linear(4, 4)
    expected = copy.deepcopy(model.state_dict())
    attach_layerwise_casting_hooks(model, torch.float32, BF16)

    output = model(torch.ones(1, 4, dtype=BF16))

    assert output.dtype is BF16
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_weight_shared_with_an_embedding_stays_as_it_is() -> None:
    model, plain = make(), make()
    for net in (model, plain):
        net.proj_out.weight = net.embed.weight
        net.conv = nn.Identity()
        net.first = nn.Identity()

    attach_layerwise_casting_hooks(model, FP8, BF16)

    assert small(model) == []
    assert model.proj_out.weight is model.embed.weight
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_layers_that_share_a_weight_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(BF16)
    model[1].weight = model[0].weight
    expected = nn.Sequential(*(copy.deepcopy(part) for part in model))
    for parameter in expected.parameters():
        parameter.data = parameter.data.to(FP8).to(BF16)
    attach_layerwise_casting_hooks(model, FP8, BF16)
    inputs = torch.ones(2, 4, dtype=BF16)

    assert model[0].weight.dtype is FP8
    assert torch.equal(model(inputs), expected(inputs))
    assert model[1].weight is model[0].weight
    remove_hook_from_submodules(model)
    assert model[0].weight.dtype is BF16
    assert model[1].weight is model[0].weight


def test_attention_keeps_the_projection_that_it_reads() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).to(BF16)
    inputs = torch.randn(1, 3, 4, dtype=BF16)
    expected = attention(inputs, inputs, inputs)[0]

    attach_layerwise_casting_hooks(attention, FP8, BF16)

    assert torch.equal(attention(inputs, inputs, inputs)[0], expected)


def test_a_forward_that_fails_leaves_the_stored_weights() -> None:
    model = make()
    attach_layerwise_casting_hooks(model, FP8, BF16)
    weight = model.proj_out.weight
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model.proj_out(torch.ones(1, 5, dtype=BF16))

    assert model.proj_out.weight is weight
    assert weight.dtype is FP8


class Countdown(nn.Module):
    """Calls itself, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.tied = self.weight
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, depth: int) -> torch.Tensor:
        self.calls += 1
        inner = self(depth - 1) if depth else torch.ones(1, dtype=self.weight.dtype)
        assert self.tied.dtype is self.weight.dtype
        return inner * self.weight


class _NoMemoryForIt(nn.Parameter):
    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise MemoryError("no memory for the cast")


def test_a_cast_that_fails_leaves_no_casts_behind() -> None:
    layer = nn.Linear(7, 11)
    layer.bias = _NoMemoryForIt(torch.ones(11))
    attach_layerwise_casting_hooks(layer, torch.bfloat16, torch.float64)

    for _ in range(2):
        with pytest.raises(MemoryError):
            layer(torch.ones(2, 7, dtype=torch.float64))

    gc.collect()
    casts = [
        item
        for item in gc.get_objects()
        if isinstance(item, torch.Tensor) and item.shape == (11, 7) and item.dtype == torch.float64
    ]
    assert casts == []
    assert layer.weight.dtype == torch.bfloat16


def test_a_module_that_calls_itself_and_changes_a_buffer() -> None:
    model = Countdown()
    add_hook_to_module(model, LayerwiseCastingHook(BF16, torch.float32, False))

    output = model(2)

    assert output.item() == 8
    assert output.dtype is torch.float32
    assert model.weight.dtype is BF16
    assert model.weight is model.tied
    assert model.calls.dtype is BF16
    assert model.calls.item() == 3


def test_gradients_pass_through_the_cast() -> None:
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    model.load_state_dict(plain.state_dict())
    model.weight.data = plain.weight.data = plain.weight.data.to(BF16).float()
    model.bias.data = plain.bias.data = plain.bias.data.to(BF16).float()
    attach_layerwise_casting_hooks(model, BF16, torch.float32)
    inputs, others = (torch.ones(1, 3, requires_grad=True) for _ in range(2))

    model(inputs).sum().backward()
    plain(others).sum().backward()

    assert torch.equal(inputs.grad, others.grad)
    assert torch.equal(model.weight.grad.float(), plain.weight.grad)


class Before(ModelHook):
    """Another hook of the same layer."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] * 2,), kwargs


def test_other_hooks_of_a_layer_stay() -> None:
    layer = nn.Linear(4, 4, bias=False).to(BF16)
    add_hook_to_module(layer, Before())
    attach_layerwise_casting_hooks(layer, FP8, BF16)
    inputs = torch.ones(1, 4, dtype=BF16)

    assert torch.equal(layer(inputs), nn.functional.linear(inputs * 2, layer.weight.to(BF16)))


def test_copies_and_state_dicts() -> None:
    model = make()
    attach_layerwise_casting_hooks(model, FP8, BF16)
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    twin.load_state_dict(torch.load(buffer))

    assert torch.equal(twin(TOKENS), model(TOKENS))
    remove_hook_from_module(twin, recurse=True)
    assert set(dtypes(twin).values()) == {BF16}
    assert small(model) == ["first.0", "conv", "proj_out"]


def test_a_compiled_model_gives_the_same() -> None:
    model = make()
    attach_layerwise_casting_hooks(model, FP8, BF16)
    compiled = torch.compile(model, backend="eager")

    with torch.no_grad():
        expected = model(TOKENS)
        outputs = [compiled(TOKENS) for _ in range(2)]

    assert all(torch.equal(output, expected) for output in outputs)
    assert small(model) == ["first.0", "conv", "proj_out"]


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"storage_dtype must be a floating-point dtype.*torch\.int8"):
        attach_layerwise_casting_hooks(make(), torch.int8, BF16)
    with pytest.raises(ValueError, match=r"compute_dtype must be a floating-point dtype.*'bf16'"):
        LayerwiseCastingHook(FP8, "bf16", False)  # type: ignore[arg-type]
    model = make()
    attach_layerwise_casting_hooks(model, FP8, BF16, ("proj", "conv"))
    with pytest.raises(ValueError, match=r"first\.0 already has a hook for layer-wise casting"):
        attach_layerwise_casting_hooks(model, FP8, BF16)
    assert small(model) == ["first.0"]
