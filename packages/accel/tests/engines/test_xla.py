"""The XLA engine against a stand-in for torch_xla 2.9, which there is not for this torch.

The stand-in has the documented calls that the engine makes, over gloo; it shows when and how often they are
made, and says nothing about XLA itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from accel.accelerator import Accelerator
from accel.engines import find_engine
from accel.engines.context import PrepareRequest
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.engines.megatron.plugin import MegatronLMPlugin
from accel.engines.xla import XLAEngine, XLALoader

pytestmark = pytest.mark.usefixtures("fresh_state")


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put torch_xla's calls in its place; returns the list in which they are noted."""
    calls: list[str] = []

    def reduce_gradients(optimizer: Any, groups: Any = None, pin_layout: bool = True) -> None:
        calls.append("reduce")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()

    def broadcast_master_param(model: torch.nn.Module) -> None:
        calls.append("broadcast")
        for item in (*model.parameters(), *model.buffers()):
            dist.broadcast(item.detach(), 0)

    parts: dict[str, dict[str, Callable[..., Any]]] = {
        "torch_xla": {"sync": lambda wait=False, reset_scope=True: calls.append("sync")},
        "torch_xla.core": {},
        "torch_xla.core.xla_model": {
            "reduce_gradients": reduce_gradients,
            "broadcast_master_param": broadcast_master_param,
        },
    }
    for name, functions in parts.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def make(steps: int = 1) -> tuple[Accelerator, torch.nn.Module, Any]:
    """An Accelerator of CPU processes whose engine is XLA's."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    accelerator.run.engine = XLAEngine(accelerator.engine.context)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return accelerator, model, optimizer


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), torch.arange(16.0).reshape(8, 2)


def two_windows(max_norm: float) -> tuple[list[str], list[float], dict[str, torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        calls = stand_in(patch)
        accelerator, model, optimizer = make(steps=2)
        assert accelerator.engine.data_parallel.rank_and_size == (accelerator.process_index, 2)
        x, y = (part.chunk(8) for part in data())
        norms = []
        for step in range(4):
            own = 2 * step + accelerator.process_index
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x[own]), y[own]))
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
                optimizer.step()
                optimizer.zero_grad()
        return (
            calls,
            norms,
            {name: value.clone() for name, value in accelerator.get_state_dict(model).items()},
        )


def test_gradients_are_averaged_once_per_window_and_before_they_are_clipped(world):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for x, y in zip(*(part.chunk(2) for part in data()), strict=True):
        F.mse_loss(model(x), y).backward()
        expected.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()

    for calls, norms, state in world.run(two_windows, 1.0):
        assert calls == ["broadcast", "reduce", "sync", "reduce", "sync"]
        assert norms == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(state, dict(model.state_dict()))


def weighted_window() -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        accelerator, model, optimizer = make(steps=2)
        x, y = (part.chunk(4) for part in data())
        for step in range(2):
            own = 2 * accelerator.process_index + step
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x[own]), y[own], reduction="sum")
                accelerator.backward(loss, weight=own + 1)
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.detach()


def test_weights_are_added_up_over_processes(world):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    (F.mse_loss(model(data()[0]), data()[1], reduction="sum") / 10).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()

    for weight in world.run(weighted_window):
        torch.testing.assert_close(weight, model.weight.detach())


def test_a_prepared_loader_ends_a_step_after_each_batch(monkeypatch):
    calls = stand_in(monkeypatch)
    accelerator = Accelerator(cpu=True)
    accelerator.run.engine = XLAEngine(accelerator.engine.context)
    _, loader = accelerator.prepare(
        torch.nn.Linear(3, 2).requires_grad_(False), torch.utils.data.DataLoader(range(4), batch_size=2)
    )
    assert isinstance(loader, XLALoader)
    assert accelerator.engine.wrap_loader(loader) is loader
    assert [len(batch) for batch in loader] == [2, 2]
    assert (len(loader), calls) == (2, ["sync", "sync"])


def test_a_loader_that_skips_batches_and_one_prepared_again_still_end_steps(monkeypatch):
    calls = stand_in(monkeypatch)
    accelerator = Accelerator(cpu=True)
    accelerator.run.engine = XLAEngine(accelerator.engine.context)
    model = torch.nn.Linear(3, 2).requires_grad_(False)
    _, loader = accelerator.prepare(model, torch.utils.data.DataLoader(range(8), batch_size=2))

    assert accelerator.prepare(loader) is loader  # a warning would be an error here
    assert accelerator.prepare(model, loader)[1] is loader
    other = Accelerator(cpu=True, gradient_accumulation_steps=2).prepare(loader)
    assert isinstance(other, XLALoader)
    assert other.gradient_state is not loader.gradient_state

    skipped = accelerator.skip_first_batches(accelerator.skip_first_batches(loader, 1), 1)
    ends = [(batch.tolist(), accelerator.gradient_state.end_of_dataloader) for batch in skipped]
    assert (ends, len(skipped)) == ([([4, 5], False), ([6, 7], True)], 2)
    assert isinstance(skipped, XLALoader)
    assert calls == ["sync", "sync"]


def test_one_process_reduces_nothing(monkeypatch):
    calls = stand_in(monkeypatch)
    accelerator, model, optimizer = make()
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    assert calls == ["sync"]


def test_what_is_not_there_on_xla_devices_is_rejected():
    context = Accelerator(cpu=True).engine.context
    for plugin in (FullyShardedDataParallelPlugin(), MegatronLMPlugin()):
        with pytest.raises(ValueError, match=r"not supported on XLA devices.*Leave them out"):
            XLAEngine(replace(context, settings=plugin))
    engine = XLAEngine(context)
    assert engine.prepare(PrepareRequest()) == PrepareRequest()


def test_without_torch_xla_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setattr("accel.engines.is_package_available", lambda module: False)
    with pytest.raises(ImportError, match=r"torch_xla.*'\./packages/accel\[xla\]'"):
        find_engine("xla")
