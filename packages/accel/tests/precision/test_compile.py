"""Compiled models: blocks are compiled once, and everything around training stays as it is."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.precision.compile import compile_regions, compile_regions_deepspeed, repeated_blocks
from accel_ops.modules import has_compiled_regions, is_compiled_module
from accel_state.handlers import TorchDynamoPlugin

pytestmark = [
    pytest.mark.usefixtures("fresh_state"),
    # dynamo asks every tensor for its gradient, and hides the warning from users but not from `error`.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

BLOCKS = 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class OtherBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class Net(torch.nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed = torch.nn.Linear(6, 6)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.heads = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.heads[0](x) + self.heads[1](x)


@pytest.fixture(autouse=True)
def _no_compiled_code():
    torch._dynamo.reset()
    counters.clear()


def batch(rows: int) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def test_blocks_are_modules_next_to_their_kind_in_a_list():
    model = Net()
    assert repeated_blocks(model) == list(model.blocks)
    assert repeated_blocks(torch.nn.ModuleDict({"inner": model})) == list(model.blocks)
    mixed = torch.nn.ModuleList([Block(), OtherBlock(), Block()])
    assert repeated_blocks(torch.nn.ModuleDict({"inner": mixed})) == list(mixed)
    assert repeated_blocks(Block()) == []
    nested = torch.nn.ModuleList([torch.nn.ModuleDict({"inner": Net()}) for _ in range(2)])
    assert repeated_blocks(torch.nn.ModuleDict({"outer": nested})) == list(nested)


def test_each_kind_of_block_is_compiled_once_and_again_only_for_another_shape():
    counting = CompileCounterWithBackend("eager")
    model = Net()
    model.blocks.append(OtherBlock())
    model.blocks.append(OtherBlock())
    plain = copy.deepcopy(model)

    assert compile_regions(model, backend=counting, fullgraph=True) is model
    assert compile_regions(model, backend="not asked again") is model
    for _ in range(3):
        model(batch(4)).sum().backward()
    assert counting.frame_count == 2
    for rows in (5, 6, 7):  # the second shape makes it dynamic
        model(batch(rows)).sum().backward()
    assert counting.frame_count == 4
    torch.testing.assert_close(model(batch(4)), plain(batch(4)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch
@pytest.mark.long
@torch._inductor.config.patch(compile_threads=1)  # its threads would stay
def test_blocks_are_compiled_by_inductor_and_not_again_for_the_next_steps():
    dynamo = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=dynamo)
    model = accelerator.prepare(Net())
    plain = Net()
    for _ in range(3):
        loss, expected = (each(batch(4)).square().mean() for each in (model, plain))
        accelerator.backward(loss)
        expected.backward()
        torch.testing.assert_close(loss, expected)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    assert counters["stats"]["unique_graphs"] == 1, "one for four blocks and three steps"
    assert counters["aot_autograd"]["ok"] == 1
    assert counters["inductor"], "nothing reached inductor"


def test_a_model_without_repeated_blocks_is_one_region():
    counting = CompileCounterWithBackend("eager")
    model = Block()
    assert compile_regions_deepspeed(model, backend=counting) is None
    model(batch(4))
    assert counting.frame_count == 1
    assert has_compiled_regions(model)


@pytest.mark.usefixtures("fresh_state")
def test_a_model_that_is_compiled_already_is_not_compiled_again():
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model = torch.compile(Net(), backend="eager")
    assert accelerator.prepare(model) is model


def test_copies_and_pickles_are_not_compiled():
    model = compile_regions(Net(), backend="eager")
    assert not has_compiled_regions(copy.deepcopy(model))
    assert not has_compiled_regions(pickle.loads(pickle.dumps(model)))


def make_accelerator(engine: str, regional: bool, precision: str = "no") -> Accelerator:
    options: dict[str, Any] = {}
    if engine == "fsdp2":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", activation_checkpointing=True
        )
    dynamo = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    return Accelerator(cpu=True, dynamo_plugin=dynamo, mixed_precision=precision, **options)


def train(engine: str, regional: bool, precision: str, folder: str) -> tuple[list[float], list[str]]:
    """Losses of four steps; the checkpoint is loaded between, which goes back by one step."""
    torch._dynamo.reset()
    counters.clear()
    accelerator = make_accelerator(engine, regional, precision)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert has_compiled_regions(model)
    assert is_compiled_module(model) is not regional
    losses = []
    for step in range(4):
        own = batch(8).chunk(accelerator.num_processes)[accelerator.process_index]
        loss = model(own).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if step == 0:
            first = counters["stats"]["unique_graphs"]
            accelerator.save_state(folder)
        if step == 1:
            accelerator.load_state(folder)
    assert losses[1] == losses[2]
    if regional:
        assert first == 1, dict(counters["stats"])
    assert counters["stats"]["unique_graphs"] == first, "compiled again"
    names = list(accelerator.get_state_dict(model))
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    assert type(plain).__name__.endswith("Net")
    assert list(plain.state_dict()) == list(Net().state_dict())
    accelerator.end_training()
    return losses, names


def expected_losses(precision: str) -> list[float]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            out = model(batch(8))
        loss = out.float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses[0], losses[1], losses[1], losses[2]]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_compiled_model_trains_saves_loads_and_unwraps_in_one_process(tmp_path: Path, precision: str):
    tolerance = 1e-6 if precision == "no" else 2e-2
    for regional in (True, False):
        losses, names = train("single", regional, precision, str(tmp_path / str(regional)))
        assert losses == pytest.approx(expected_losses(precision), rel=tolerance)
        assert names == list(Net().state_dict())


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("regional", [True, False], ids=["regional", "whole"])
def test_a_compiled_model_trains_saves_loads_and_unwraps_on_two(world, tmp_path, engine, regional):
    (losses, names), (other, _) = world.run(train, engine, regional, "no", str(tmp_path / "state"))
    assert losses == other
    assert losses == pytest.approx(expected_losses("no"), rel=1e-5)
    assert names == list(Net().state_dict())
