"""Adapters that are made by hand: few trained parameters next to frozen ones, under each engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin

pytestmark = pytest.mark.usefixtures("fresh_state")

State = dict[str, torch.Tensor]

ENGINES = {"single": 1, "ddp": 2, "fsdp1": 2, "fsdp2": 2}
"""By the number of processes."""

TRAINED = {f"blocks.{block}.{part}.weight" for block in (0, 1) for part in ("down", "up")}


class Block(torch.nn.Module):
    """A frozen layer, and a trainable product of two narrow ones next to it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Net(torch.nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, adapters: int = 0) -> None:
        """The frozen weights are always the same; `adapters` is the seed of the others."""
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(6, 6).requires_grad_(False)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        torch.manual_seed(adapters)
        for parameter in self.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def make_accelerator(engine: str) -> Accelerator:
    options: dict[str, Any] = {}
    if engine.startswith("fsdp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=int(engine[-1]),
            auto_wrap_policy="transformer_based_wrap",
            sync_module_states=True,
            use_orig_params=True if engine == "fsdp1" else None,
        )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    assert accelerator.engine.name == engine
    return accelerator


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=0.1)


def batches(step: int) -> torch.Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: range) -> list[float]:
    """Train on the process's shard of the data; returns the norms of the gradients."""
    norms = []
    for step in steps:
        for batch in batches(step):
            own = batch.chunk(accelerator.num_processes)[accelerator.process_index]
            with accelerator.accumulate(model):
                accelerator.backward(model(own).square().mean())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                optimizer.zero_grad()
    return norms


def plain_run(steps: int) -> tuple[State, list[float]]:
    model = Net()
    optimizer = make_optimizer(model)
    norms = []
    for step in range(steps):
        for batch in batches(step):
            (model(batch).square().mean() / 2).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


def prepare(engine: str, seed: int) -> tuple[Accelerator, Any, Any]:
    accelerator = make_accelerator(engine)
    raw = Net(seed + accelerator.process_index)  # the first process's weights count
    return accelerator, *accelerator.prepare(raw, make_optimizer(raw))


def whole_state(accelerator: Accelerator, model: Any) -> State:
    return copy.deepcopy(accelerator.get_state_dict(model))


def interrupted(engine: str, folder: str) -> tuple[list[float], list[State], int]:
    """Two steps, a save, a third step; then this third step again, by another training."""
    accelerator, model, optimizer = prepare(engine, 0)
    norms = train(accelerator, model, optimizer, range(2))
    accelerator.save_state(folder)
    norms += train(accelerator, model, optimizer, range(2, 3))
    states = [whole_state(accelerator, model)]

    accelerator, model, optimizer = prepare(engine, 7)
    accelerator.load_state(folder)
    assert train(accelerator, model, optimizer, range(2, 3)) == norms[2:]
    states.append(whole_state(accelerator, model))
    return norms, states, len(optimizer.state)


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_train_next_to_frozen_weights_and_are_resumed_exactly(world, tmp_path, engine):
    expected, norms = plain_run(3)

    results = world.run(interrupted, engine, str(tmp_path / "state"), size=ENGINES[engine])

    for own_norms, *_ in results:
        assert own_norms == pytest.approx(norms, rel=1e-5)
    state, again = results[0][1]
    before = Net().state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, before[name]) is (name not in TRAINED)
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    # Under FSDP1 a process may have no element of some of them.
    assert max(states for *_, states in results) == len(TRAINED)


def saved_apart(engine: str, file: str) -> tuple[State, State, State]:
    """The trained model; frozen weights with the adapter of a file, loaded before they are prepared."""
    accelerator, model, optimizer = prepare(engine, 0)
    train(accelerator, model, optimizer, range(2))
    trained = {name for name, item in Net().named_parameters() if item.requires_grad}
    state = whole_state(accelerator, model)
    adapter = {name: value for name, value in state.items() if name in trained}
    accelerator.save(adapter, file, safe_serialization=True)
    accelerator.wait_for_everyone()

    accelerator = make_accelerator(engine)
    raw = Net(7)
    found = raw.load_state_dict(load_file(file), strict=False)
    assert not found.unexpected_keys
    model, optimizer = accelerator.prepare(raw, make_optimizer(raw))
    loaded = whole_state(accelerator, model)
    train(accelerator, model, optimizer, range(2, 3))  # continues
    return state, loaded, whole_state(accelerator, model)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_is_saved_and_loaded_without_the_frozen_weights(world, tmp_path, engine):
    file = tmp_path / "adapter.safetensors"

    (state, loaded, after), *_ = world.run(saved_apart, engine, str(file), size=ENGINES[engine])

    assert set(load_file(file)) == TRAINED
    assert list(loaded) == list(state)
    assert all(torch.equal(value, loaded[name]) for name, value in state.items())
    assert {name for name, value in after.items() if not torch.equal(value, loaded[name])} == TRAINED


def checkpoint_of_adapters(engine: str, folder: str) -> tuple[State, State]:
    """Hooks that write and read the adapter in the place of the model, as training scripts have them."""

    def hooked(accelerator: Accelerator) -> None:
        def save(models: list[Any], weights: list[State], output_dir: str) -> None:
            (state,) = weights
            weights.clear()
            adapter = {name: value for name, value in state.items() if name in TRAINED}
            accelerator.save(adapter, Path(output_dir) / "adapter.safetensors", safe_serialization=True)

        def load(models: list[Any], input_dir: str) -> None:
            (model,) = models
            models.clear()
            state = load_file(Path(input_dir) / "adapter.safetensors")
            found = accelerator.unwrap_model(model).load_state_dict(state, strict=False)
            assert not found.unexpected_keys

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)

    accelerator, model, optimizer = prepare(engine, 0)
    hooked(accelerator)
    train(accelerator, model, optimizer, range(2))
    accelerator.save_state(folder)
    train(accelerator, model, optimizer, range(2, 4))
    state = whole_state(accelerator, model)

    accelerator, model, optimizer = prepare(engine, 7)
    hooked(accelerator)
    accelerator.load_state(folder)
    train(accelerator, model, optimizer, range(2, 4))
    return state, whole_state(accelerator, model)


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_a_checkpoint_with_the_adapter_alone_is_resumed_exactly(world, tmp_path, engine):
    folder = tmp_path / "state"

    for state, again in world.run(checkpoint_of_adapters, engine, str(folder), size=ENGINES[engine]):
        assert list(state) == list(again)
        assert all(torch.equal(value, again[name]) for name, value in state.items())

    assert set(load_file(folder / "adapter.safetensors")) == TRAINED
    assert not [*folder.glob("model*")]
