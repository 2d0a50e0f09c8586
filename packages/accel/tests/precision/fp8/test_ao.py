"""fp8 with torchao, for real: layers that multiply in fp8, and losses next to those of bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.precision.fp8.ao import (
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    has_ao_layers,
    torchao_required,
)
from accel.precision.fp8.recipes import AORecipeKwargs
from accel_state.parallelism.config import ParallelismConfig
from accel_world.warned import warns_once

pytest.importorskip("torchao.float8", reason="torchao is not installed")
pytestmark = pytest.mark.usefixtures("fresh_state")

WIDTH, STEPS = 32, 20
TOLERANCE = 0.01  # between losses of fp8 and bf16, which go from 1.2 to 0.05; measured 0.0015 in one process


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)
        self.odd = torch.nn.Linear(WIDTH, WIDTH - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) + self.odd(x).mean()


class Net(torch.nn.Module):
    _no_split_modules = ("Block",)
    _tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012 - as transformers has it

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_fp8(model: torch.nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if type(part).__name__ == "Float8Linear"]


def test_the_filter_leaves_out_the_first_and_the_last():
    model = Net()
    names = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    assert [name for name in names if filter_first_and_last_linear_layers(model, name)] == names[1:-1]
    assert not filter_first_and_last_linear_layers(model, "blocks")


def test_inner_layers_are_converted_in_place_with_their_parameters():
    model = Net()
    before = dict(model.named_parameters())
    assert not has_ao_layers(model)
    assert convert_model_to_fp8_ao(model) is None
    assert has_ao_layers(model)
    assert in_fp8(model) == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    with_odd = Net()
    convert_model_to_fp8_ao(with_odd, module_filter_func=filter_first_and_last_linear_layers)
    assert "blocks.0.odd" in in_fp8(with_odd)
    chosen = Net()
    convert_model_to_fp8_ao(chosen, module_filter_func=lambda layer, name: name == "head")
    assert in_fp8(chosen) == ["head"]
    with pytest.raises(ValueError, match="single linear layer"):
        convert_model_to_fp8_ao(torch.nn.Linear(16, 16))


def test_a_function_that_needs_torchao_says_so(monkeypatch):
    monkeypatch.setattr("accel.precision.fp8.ao.is_torchao_available", lambda: False)
    with pytest.raises(ImportError, match=r"quantize needs torchao.*accel\[fp8\]"):
        torchao_required(quantize)()


def quantize() -> None: ...


def data() -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))


def train(engine: str, precision: str, folder: str | None) -> tuple[list[float], str]:
    """Losses of the steps, and what the weight of a block is made of; the checkpoint is loaded half-way."""
    options: dict[str, Any] = {}
    if engine == "fsdp2":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
        )
    if engine == "tp":
        options["parallelism_config"] = ParallelismConfig(tp_size=2)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **options)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert accelerator.prepare(model) is model
    plain = accelerator.unwrap_model(model)
    assert has_ao_layers(plain) is (precision == "fp8")
    rank, size = accelerator.engine.data_parallel.rank_and_size
    own = data().chunk(size)[rank]
    losses: list[float] = []
    for step in range(STEPS):
        if folder and step == STEPS // 2:
            accelerator.save_state(folder)
        loss = (model(own) - own.roll(1, -1)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert list(state) == list(Net().state_dict())
        assert {type(value) for value in state.values()} == {torch.Tensor}
        assert {value.dtype for value in state.values()} == {torch.float32}
    if folder:
        accelerator.load_state(folder)
        loss = (model(own) - own.roll(1, -1)).square().mean()
        assert accelerator.reduce(loss.detach(), "mean").item() == losses[STEPS // 2]
    weight = plain.blocks[0].up.weight
    kind = type(weight.to_local() if isinstance(weight, DTensor) else weight.data).__name__
    accelerator.end_training()
    return losses, kind


def bf16_losses() -> list[float]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(data())
        loss = (out.float() - data().roll(1, -1)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_losses(losses: list[float]) -> None:
    expected = bf16_losses()
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    assert losses != expected  # it did round to fp8
    assert losses[-1] < 0.1 * losses[0]


def test_one_process_trains_next_to_bf16(tmp_path: Path):
    losses, kind = train("single", "fp8", str(tmp_path / "state"))
    check_losses(losses)
    assert kind == "Tensor"


@pytest.mark.parametrize(
    ("engine", "kind"),
    [("ddp", "Tensor"), ("tp", "Tensor"), ("fsdp2", "WeightWithDynamicFloat8CastTensor")],
)
def test_two_processes_train_next_to_bf16(world, tmp_path: Path, engine: str, kind: str):
    folder = str(tmp_path / "state")
    # The first run in a worker imports torchao, which takes long on a busy machine.
    (losses, first), (others, second) = world.run(train, engine, "fp8", folder, timeout_s=90)
    assert losses == others
    check_losses(losses)
    assert (first, second) == (kind, kind)


def gathered_dtypes() -> list[set[torch.dtype]]:
    """Of what FSDP2 gathers in forward, with and without gathering in fp8."""
    found = []
    for gathers in (True, False):
        recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=gathers)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        accelerator = Accelerator(
            cpu=True, mixed_precision="fp8", fsdp_plugin=plugin, kwargs_handlers=[recipe]
        )
        model = accelerator.prepare(Net())
        block, seen = model.blocks[0], set()

        def note(layer: Any, args: Any, seen: set[torch.dtype] = seen) -> None:
            weight = layer.weight
            seen.add(getattr(weight, "_data", weight).dtype)

        block.up.register_forward_pre_hook(note)
        model(data())
        found.append(seen)
        if gathers:
            with warns_once(UserWarning, "ignored for Net: FSDP2 alone gathers"):
                evaluated = accelerator.prepare_model(Net(), evaluation_mode=True)
            assert type(evaluated.blocks[0].up.weight.data) is torch.Tensor
    return found


def test_fsdp2_gathers_weights_in_fp8_and_not_on_request(world):
    for with_fp8, without in world.run(gathered_dtypes, timeout_s=90):
        assert with_fp8 == {torch.float8_e4m3fn}
        assert without == {torch.bfloat16}


def test_gathering_in_fp8_elsewhere_is_reported_as_ignored():
    recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    with pytest.warns(UserWarning, match="enable_fsdp_float8_all_gather is ignored"):
        accelerator.prepare(Net())


def test_the_recipe_chooses_the_layers():
    recipe = AORecipeKwargs(module_filter_func=lambda layer, name: name == "head")
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    assert in_fp8(accelerator.prepare(Net())) == ["head"]


def test_a_model_with_nothing_to_convert_is_advised_to_train_in_bf16():
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    with pytest.warns(UserWarning, match="computes no layer of Sequential in fp8"):
        accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)))
