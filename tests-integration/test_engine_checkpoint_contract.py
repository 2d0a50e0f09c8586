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
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel.state import AcceleratorState
from accel_world.engine_cases import CASES, SHARDED_CASES, marked

WIDTH, LENGTH = 8, 8

EVERY = CASES | {
    name: SHARDED_CASES[name] for name in ("fsdp1 sharded", "fsdp1 local files", "fsdp2 sharded")
}
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
    loader = DataLoader(TensorDataset(torch.zeros(32, 1)), batch_size=8)  # DeepSpeed requests its batch size
    model, optimizer, _ = accelerator.prepare(net, optimizer, loader)
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Make one step; return the full weights, on the main process."""
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


OWN_FILES = ("deepspeed", "fsdp1 local files")
"""Engines whose own files have the model, whatever hooks do."""


def save_by_hook(case: str, folder: str) -> tuple[Any, ...]:
    accelerator, model, optimizer = prepared(case, 1)
    given: list[tuple[int, int]] = []

    def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        given.append((len(models), len(weights)))
        state = accelerator.get_state_dict(models[0])
        if accelerator.is_main_process:
            torch.save({name: value + 1 for name, value in state.items()}, f"{output_dir}/by_hook.bin")
        if weights:
            weights.pop()

    accelerator.register_save_state_pre_hook(hook)
    weights = train(accelerator, model, optimizer)
    accelerator.save_state(f"{folder}/state")
    accelerator.end_training()
    return weights, given, optimizer_state(optimizer)


def optimizer_state(optimizer: Any) -> list[float]:
    """The sums of the first parameter's state on this process, which tell whether it was loaded."""
    state = next(iter(optimizer.state.values()))
    values = [getattr(state[name], "_local_tensor", state[name]) for name in sorted(state)]
    return [float(value.double().sum()) for value in values]


def load_by_hook(case: str, folder: str) -> tuple[Any, ...]:
    accelerator, model, optimizer = prepared(case, 2)

    def hook(models: list[Any], input_dir: str) -> None:
        taken = models.pop()
        if not case.startswith("deepspeed"):
            state = torch.load(f"{input_dir}/by_hook.bin", weights_only=True)
            set_model_state_dict(taken, state, options=StateDictOptions(full_state_dict=True))

    accelerator.register_load_state_pre_hook(hook)
    accelerator.load_state(f"{folder}/state")
    weights, state = whole(accelerator, model), optimizer_state(optimizer)
    train(accelerator, model, optimizer)
    accelerator.end_training()
    return weights, state


@on_every_engine
def test_hooks_take_models_out(world: Any, tmp_path: Path, case: str) -> None:
    size = EVERY[case].size

    saved = world.run(save_by_hook, case, str(tmp_path), size=size)
    loaded = world.run(load_by_hook, case, str(tmp_path), size=size)

    (weights, *_), own = saved[0], case.startswith(OWN_FILES)
    assert [given for _, given, _ in saved] == [[(1, 0 if own else 1)]] * size
    files = {path.name for path in (tmp_path / "state").iterdir()}
    assert not files & {"model.safetensors", "pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"}
    expected = weights if own else {name: value + 1 for name, value in weights.items()}
    torch.testing.assert_close(loaded[0][0], expected, rtol=0, atol=0)
    assert [state for _, state in loaded] == [state for *_, state in saved]


def resume_window(folder: str, resumes: bool) -> list[float]:
    """Make a step of two micro-batches, with `resumes` the second after a load whose hook takes the model."""
    weights = []
    for seed in (1, 2) if resumes else (1,):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        net = make_net(seed, compiled=False)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.register_save_state_pre_hook(lambda models, states, _: states.clear())
        accelerator.register_load_state_pre_hook(lambda models, _: models.pop().load_state_dict(weights[0]))
        x = torch.randn(8, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
        for micro_batch in (0, 1) if seed == 1 else (1,):
            if seed == 2:
                accelerator.load_state(folder)
            with accelerator.accumulate(model):
                accelerator.backward(model(x[micro_batch::2]).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
            if resumes and micro_batch == 0:
                weights.append({name: value.clone() for name, value in net.state_dict().items()})
                accelerator.save_state(folder)
        accelerator.end_training()
        AcceleratorState._reset_state(reset_partial_state=True)
    return [float(value.double().sum()) for value in net.state_dict().values()]


def test_a_window_continues_where_a_hook_takes_the_model(world: Any, tmp_path: Path) -> None:
    resumed = world.run(resume_window, str(tmp_path / "state"), True, size=1)
    assert resumed == world.run(resume_window, str(tmp_path / "state"), False, size=1)
