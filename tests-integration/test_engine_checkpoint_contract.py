"""What checkpoints promise under every engine: plain names of compiled modules, and hooks.

Each test runs on real processes, under the engines of `accel_world.engine_cases`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel_world.engine_cases import CASES, IN_PARTS, marked

WIDTH, LENGTH = 8, 8

EVERY = CASES | {name: IN_PARTS[name] for name in ("fsdp1 in parts", "fsdp1 in own files", "fsdp2 in parts")}
on_every_engine = pytest.mark.parametrize("case", marked(EVERY))


class Block(torch.nn.Module):
    """A feed-forward layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(torch.nn.Module):
    """Two blocks."""

    _no_split_modules = ("Block",)
    _tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012 - as in transformers

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = x.unsqueeze(1)  # one head
        return torch.tanh(self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True)))


NAMES = list(Net().state_dict())


def make_net(seed: int, compiled: bool) -> Net:
    torch.manual_seed(seed)
    net = Net()
    if compiled:
        net.blocks[0].up = torch.compile(net.blocks[0].up, backend="eager")
        net.blocks[0] = torch.compile(net.blocks[0], backend="eager")
    return net


def prepared(case: str, seed: int, compiled: bool = False) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(**EVERY[case].options())
    net = make_net(seed, compiled)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.zeros(32, 1)), batch_size=8)  # DeepSpeed asks for its batch size
    model, optimizer, _ = accelerator.prepare(net, optimizer, loader)
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Make one step; return the whole weights, on the main process."""
    x = torch.randn(8, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    with accelerator.maybe_context_parallel([x], [1], {x}):
        accelerator.backward(model(x).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    return whole(accelerator, model)


def whole(accelerator: Accelerator, model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def save_compiled(case: str, folder: str, compiled: bool) -> tuple[Any, ...]:
    accelerator, *objects = prepared(case, 1, compiled)
    weights = train(accelerator, *objects)
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(objects[0], f"{folder}/model")
    plain = accelerator.unwrap_model(objects[0], keep_torch_compile=False)
    names = list(plain.state_dict()) if "fsdp1" not in case else NAMES  # its parameters lie in vectors
    after = train(accelerator, *objects)
    accelerator.end_training()
    return weights, names, after


def load_compiled(case: str, folder: str, compiled: bool) -> tuple[Any, ...]:
    accelerator, *objects = prepared(case, 2, compiled)
    accelerator.load_state(f"{folder}/state")
    weights = whole(accelerator, objects[0])
    after = train(accelerator, *objects)
    accelerator.end_training()
    return weights, after


@on_every_engine
@pytest.mark.filterwarnings(  # of torch, for what it finds while it traces
    "ignore:.*Function'> should not be instantiated",
    "ignore:The .grad attribute",
    "ignore:Dynamo detected a call to a `functools.lru_cache`",
)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled to plain", "plain to compiled"])
def test_names_of_compiled_submodules_are_plain(
    world: Any, tmp_path: Path, case: str, compiled: bool
) -> None:
    size = EVERY[case].size

    weights, names, after = world.run(save_compiled, case, str(tmp_path), compiled, size=size)[0]
    loaded, continued = world.run(load_compiled, case, str(tmp_path), not compiled, size=size)[0]

    assert sorted(weights) == sorted(names) == sorted(NAMES)
    assert sorted(load_file(tmp_path / "model" / "model.safetensors")) == sorted(NAMES)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"_orig_mod" in path.read_bytes()]
    torch.testing.assert_close(loaded, weights, rtol=0, atol=0)
    torch.testing.assert_close(continued, after)  # the optimizer's state was loaded, too
