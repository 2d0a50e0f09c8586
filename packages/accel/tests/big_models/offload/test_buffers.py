"""Offloaded buffers that a forward updates: the next one sees what it wrote, as in the plain model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import cpu_offload, disk_offload, dispatch_model
from accel.hooks import remove_hook_from_submodules


class Counting(nn.Module):
    """Updates buffers as modules do: in place, by another tensor, by a part, past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("last", torch.zeros(2, 3))
        self.register_buffer("hidden", torch.zeros(3))
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls += 1
            self.total = self.total + x.sum(0)
            self.last[int(self.calls) % 2] = x[0]
            if self.training:
                self.hidden.data.add_(x.mean(0))
        out: torch.Tensor = x * self.scale + self.total + self.last.sum(0) + self.hidden + self.calls
        return out


class Shared(nn.Module):
    """Two modules with one counter, of which one counts and the other reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Counting(), Counting()
        self.second.calls = self.first.calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


Offload = Callable[[nn.Module, Path], nn.Module]
WAYS: dict[str, Offload] = {
    "cpu": lambda model, folder: cpu_offload(model, "cpu", offload_buffers=True),
    "disk": lambda model, folder: disk_offload(model, folder, "cpu", offload_buffers=True),
    "map": lambda model, folder: dispatch_model(
        model, {"": "disk"}, offload_dir=folder, offload_buffers=True
    ),
}
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "gradients": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "shared":
        return Shared()
    norm = nn.BatchNorm1d(3)
    return nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3)) if kind == "norm" else Counting()


def same(model: nn.Module, plain: nn.Module) -> bool:
    found, expected = model.state_dict(), plain.state_dict()
    return list(found) == list(expected) and all(
        not found[name].is_meta and torch.equal(found[name], value) for name, value in expected.items()
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["norm", "counter", "shared"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_forward_writes_to_buffers_stays(
    way: str, kind: str, training: bool, mode: str, tmp_path: Path
) -> None:
    plain = make(kind).train(training)
    model = WAYS[way](make(kind).train(training), tmp_path)

    for step in range(4):
        x = torch.randn(4, 3)
        with MODES[mode]():
            assert torch.equal(model(x), plain(x)), step
        assert same(model, plain), step
    remove_hook_from_submodules(model)
    assert same(model, plain)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("way", WAYS)
def test_copies_keep_what_was_written_before(way: str, tmp_path: Path) -> None:
    plain = make("counter")
    model = WAYS[way](make("counter"), tmp_path)
    x = torch.ones(2, 3)
    assert torch.equal(model(x), plain(x))

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own = copy.deepcopy(plain)
        for _ in range(2):
            assert torch.equal(other(x), own(x))
        assert same(other, own)
    assert same(model, plain)


def test_only_buffers_that_are_updated_stay_in_memory(tmp_path: Path) -> None:
    model = disk_offload(make("counter").eval(), tmp_path, "cpu", offload_buffers=True)

    with torch.no_grad():
        model(torch.ones(2, 3))

    kept = {name for name, buffer in model.named_buffers() if not buffer.is_meta}
    assert kept == {"calls", "total", "last"}


def test_a_model_whose_buffers_were_updated_is_dispatched_again(tmp_path: Path) -> None:
    plain = make("norm")
    model = WAYS["map"](make("norm"), tmp_path / "first")
    x = torch.randn(4, 3)
    assert torch.equal(model(x), plain(x))

    WAYS["map"](model, tmp_path / "second")

    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert same(model, plain)
    assert torch.equal(model(x), plain(x))
